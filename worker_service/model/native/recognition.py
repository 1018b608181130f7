"""A model's description for the native step, from its modules and from what they compute; no model is known by name.

What is recognised may still be wrong, for a model may do more than its modules show. So the check after packing decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from ...native.description import (
    LayerDescription,
    ModelDescription,
    NormDescription,
    RotaryDescription,
    Rows,
)
from ...native.library import Activation
from ..forward.layers import AttentionLayer
from .errors import NotNative

_TRIED = 64
"""Numbers that an activation or a norm is tried with."""
_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.silu: torch.nn.functional.silu,
    Activation.gelu_tanh: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation.gelu: torch.nn.functional.gelu,
    Activation.relu: torch.nn.functional.relu,
}


def describe(model: Any, layers: Sequence[AttentionLayer], dtype: torch.dtype, max_model_len: int) -> ModelDescription:
    """Raises NotNative with the first thing that the native step does not know."""
    if len({layer.module for layer in layers}) < len(layers):
        raise NotNative("a layer attends several times")
    for layer in layers:
        _check_heads(layer)
    decoder, decoder_layers = _decoder(model, layers)
    rotary = _rotary(decoder, max_model_len)
    described = [
        _layer(decoder_layer, layer, rotary) for decoder_layer, layer in zip(decoder_layers, layers, strict=True)
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    hidden_size = embedding.weight.shape[1]
    positions = [child for child in decoder.children() if type(child) is torch.nn.Embedding and child is not embedding]
    if len(positions) > 1 or any(len(child.weight) < max_model_len for child in positions):
        raise NotNative(
            f"it has {len(positions)} tables of positions; needed: one at most, as long as its longest sequence"
        )
    text = model.config.get_text_config(decoder=True)
    if hidden_size % 2 or head.weight.shape[1] != hidden_size:
        raise NotNative(
            f"its embedding has {hidden_size} numbers, its head {head.weight.shape[1]}; needed: the same, even"
        )
    last_norms = [norm for child in decoder.children() if (norm := _norm(child)) is not None]
    if len(last_norms) != 1:
        raise NotNative(f"{len(last_norms)} norms follow its layers; needed: one")
    return ModelDescription(
        dtype=dtype,
        hidden_size=hidden_size,
        vocab_size=_outputs(head),
        embedding=embedding,
        head=_rows(head),
        last_norm=last_norms[0],
        layers=described,
        positions=positions[0].weight if positions else None,
        # The check finds out whether the config's factors mean this.
        embedding_scale=_embedding_scale(embedding) * (getattr(text, "embedding_multiplier", None) or 1.0),
        residual_scale=getattr(text, "residual_multiplier", None) or 1.0,
    )


def find_finish(
    config: Any, before: torch.Tensor, after: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What a model does to its logits after the head: nothing (None), a factor, or a soft cap. Raises NotNative.

    before: outputs of the head; after: the model's logits, both [T, vocab_size] float32.
    """
    if torch.equal(before, after):
        return None
    for finish in _finishes(config.get_text_config(decoder=True)):
        if torch.allclose(finish(before), after, rtol=1e-2, atol=1e-3):
            return finish
    raise NotNative(
        "it changes its logits after the head in a way that is neither a factor nor a soft cap of its config"
    )


def _finishes(config: Any) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap:
        yield lambda logits: softcap * torch.tanh(logits / softcap)
    if divisor := getattr(config, "logits_scaling", None):
        yield lambda logits: logits / divisor
    if factor := getattr(config, "logit_scale", None):
        yield lambda logits: logits * factor


def _embedding_scale(embedding: Any) -> float:
    """The factor that the embedding module itself applies to its rows."""
    ids = torch.arange(min(_TRIED, len(embedding.weight)))
    with torch.inference_mode():
        rows, weight = embedding(ids).double(), embedding.weight[ids].double()
    scale = float((rows * weight).sum() / weight.square().sum())
    if (rows - weight * scale).abs().max() > 1e-2 * rows.abs().max():
        raise NotNative(
            f"its embedding is a {type(embedding).__name__}, which does not give rows of its weight times a factor"
        )
    return 1.0 if abs(scale - 1) < 1e-6 else scale


def _check_heads(attention: AttentionLayer) -> None:
    if attention.k_head_dim != attention.v_head_dim or attention.call.sinks is not None:
        raise NotNative(
            "its heads of K and V differ in size" if attention.call.sinks is None else "it has attention sinks"
        )


def _decoder(model: Any, layers: Sequence[AttentionLayer]) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """The module with the list of layers, and the layers that hold the attention modules."""
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    holders = [parents[layer.module] for layer in layers]
    lists = {parents.get(holder) for holder in holders}
    (found,) = lists if len(lists) == 1 else (None,)
    if not isinstance(found, torch.nn.ModuleList) or list(found) != holders:
        raise NotNative("its layers are not one list of modules, each with one attention")
    return parents[found], holders


def _layer(
    decoder_layer: torch.nn.Module, attention: AttentionLayer, rotary: RotaryDescription | None
) -> LayerDescription:
    if rotary is not None and rotary.size > attention.k_head_dim:
        raise NotNative(f"its rotary module rotates {rotary.size} numbers of heads of {attention.k_head_dim}")
    norms, others = _sorted(child for child in decoder_layer.children() if child is not attention.module)
    if len(others) != 1:
        raise NotNative(
            f"a layer has {len(others)} modules with weights besides norms and attention; needed: one, the MLP"
        )
    query, key, value, out, query_norm, key_norm = _attention(attention)
    gate, up, down, activation = _mlp(others[0])
    before_attention, after_attention, before_mlp, after_mlp = _placed(norms)
    return LayerDescription(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=attention.k_head_dim,
        scaling=attention.call.scaling,
        window=attention.window,
        softcap=attention.call.softcap,
        query=query,
        key=key,
        value=value,
        out=out,
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        rotary=rotary,
        before_attention=before_attention,
        after_attention=after_attention,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _sorted(modules: Iterable[torch.nn.Module]) -> tuple[list[NormDescription], list[torch.nn.Module]]:
    """The norms among them, and the others that have weights, each in order."""
    norms: list[NormDescription] = []
    others: list[torch.nn.Module] = []
    for module in modules:
        norm = _norm(module)
        if norm is not None:
            norms.append(norm)
        elif _has_weights(module):
            others.append(module)
    return norms, others


def _has_weights(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _placed(norms: list[NormDescription]) -> list[NormDescription | None]:
    """Of a layer: before attention, after it, before the MLP, after it."""
    if len(norms) == 2:
        return [norms[0], None, norms[1], None]
    if len(norms) == 4:
        return list(norms)
    raise NotNative(f"a layer has {len(norms)} norms; needed: 2 or 4")


def _attention(
    attention: AttentionLayer,
) -> tuple[Rows, Rows, Rows, Rows, NormDescription | None, NormDescription | None]:
    """Q, K, V, output, and the norms of Q's and K's heads."""
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.k_head_dim
    linears = [child for child in attention.module.children() if _is_linear(child)]
    norms, others = _sorted(child for child in attention.module.children() if not _is_linear(child))
    if others:
        raise NotNative("its attention has modules besides linear layers and norms")
    if len(norms) not in (0, 2) or any(norm.weight is not None and norm.weight.numel() != size for norm in norms):
        raise NotNative(f"its attention has {len(norms)} norms; needed: none, or one of each head of Q and one of K")
    widths = (heads * size, kv_heads * size, kv_heads * size)
    fused = [linear for linear in linears if len(linears) == 2 and _outputs(linear) == sum(widths)]
    if len(linears) == 4 and tuple(_outputs(linear) for linear in linears[:3]) == widths:
        query, key, value = (_rows(linear) for linear in linears[:3])
        out = _rows(linears[3])
    elif len(fused) == 1:
        query, key, value = (
            _rows(fused[0])._replace(first=sum(widths[:index]), num_outputs=width) for index, width in enumerate(widths)
        )
        (out,) = (_rows(linear) for linear in linears if linear is not fused[0])
    else:
        raise NotNative(
            f"its attention has {len(linears)} linear layers of other sizes than those of Q, K, V and output"
        )
    query_norm, key_norm = norms or (None, None)
    return query, key, value, out, query_norm, key_norm


def _mlp(mlp: torch.nn.Module) -> tuple[Rows | None, Rows, Rows, Activation]:
    """Gate, up, down and the activation."""
    linears = [child for child in mlp.children() if _is_linear(child)]
    others = [child for child in mlp.children() if not _is_linear(child)]
    functions = [child for child in others if not _has_weights(child)]
    if len(functions) < len(others):
        raise NotNative("its MLP has modules besides linear layers and an activation")
    activation = _activation([*functions, getattr(mlp, "act_fn", None), getattr(mlp, "act", None)])
    inputs = _inputs(linears[-1]) if linears else 0
    if len(linears) == 3 and _outputs(linears[0]) == _outputs(linears[1]) == inputs:
        return _rows(linears[0]), _rows(linears[1]), _rows(linears[2]), activation
    if len(linears) == 2 and _outputs(linears[0]) == 2 * inputs:
        both = _rows(linears[0])
        return (
            both._replace(num_outputs=inputs),
            both._replace(first=inputs, num_outputs=inputs),
            _rows(linears[1]),
            activation,
        )
    if len(linears) == 2 and _outputs(linears[0]) == inputs:
        return None, _rows(linears[0]), _rows(linears[1]), activation
    raise NotNative(f"its MLP has {len(linears)} linear layers of other sizes than those of gate, up and down")


def _activation(functions: Sequence[Any]) -> Activation:
    numbers = torch.linspace(-6, 6, _TRIED)
    for function in functions:
        if not callable(function):
            continue
        with torch.inference_mode():
            result = function(numbers)
        for activation, known in _ACTIVATIONS.items():
            if isinstance(result, torch.Tensor) and torch.allclose(result, known(numbers), atol=1e-6):
                return activation
    raise NotNative("the activation of its MLP is none of " + ", ".join(activation.name for activation in _ACTIVATIONS))


def _rotary(decoder: torch.nn.Module, max_model_len: int) -> RotaryDescription | None:
    """cos and sin of the model's own rotary module, its scaling included; None: it has none."""
    modules = [child for child in decoder.children() if hasattr(child, "inv_freq")]
    if not modules:
        return None
    if len(modules) > 1:
        raise NotNative("it has several rotary modules")
    positions = torch.arange(max_model_len)[None]
    with torch.inference_mode():
        found = modules[0](torch.zeros(1), positions)
    if not isinstance(found, tuple) or len(found) != 2 or found[0].shape[:2] != positions.shape:
        raise NotNative("its rotary module does not return cos and sin of every position")
    cos, sin = (table[0].float() for table in found)
    size = cos.shape[-1]
    half = size // 2
    if size % 2 or not torch.equal(cos[:, :half], cos[:, half:]):
        raise NotNative("its rotary module does not rotate pairs of a head's halves")
    return RotaryDescription(cos[:, :half].contiguous(), sin[:, :half].contiguous(), size, is_interleaved=False)


def _norm(module: torch.nn.Module) -> NormDescription | None:
    """The RMSNorm or LayerNorm that the module computes; None if it is neither."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return None
    own = weight.detach().float()
    bias = getattr(module, "bias", None)
    bias = bias.detach().float().contiguous() if isinstance(bias, torch.Tensor) else None
    numbers = torch.randn(3, len(own), generator=torch.Generator().manual_seed(0)) + 0.5
    with torch.inference_mode():
        wanted = module(numbers.to(weight.dtype)).float()
    tolerance = 1e-4 if weight.dtype == torch.float32 else 0.05
    for is_centered in (False, True):
        mean = numbers.mean(-1, keepdim=True) if is_centered else 0
        normed = (numbers - mean) * torch.rsqrt((numbers - mean).square().mean(-1, keepdim=True) + epsilon)
        for factor in (own, own + 1):  # Gemma's norms multiply by 1 + weight
            result = normed * factor + (0 if bias is None else bias)
            if (result - wanted).abs().max() <= tolerance * wanted.abs().max():
                return NormDescription(factor.contiguous(), bias, epsilon, is_centered)
    return None


def _is_linear(module: torch.nn.Module) -> bool:
    return type(module) in (torch.nn.Linear, Conv1D)


def _rows(module: Any) -> Rows:
    return Rows(module, 0, _outputs(module), type(module) is Conv1D)


def _outputs(module: Any) -> int:
    return int(module.weight.shape[1 if type(module) is Conv1D else 0])


def _inputs(module: Any) -> int:
    return int(module.weight.shape[0 if type(module) is Conv1D else 1])
