"""How an encoder-decoder model of transformers is called: its encoder on one input, its decoder on a packed row; and what is found
of its decoder: the attention layers, the positions, and what scores add by distance."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from ...attention.layer import AttentionCall
from ..errors import UnsupportedModel
from .given_positions import GivenPositions, find_position_tables
from .layers import AttentionLayer, bound, placeholder, record_layers

_NO_LIMIT = 1 << 30
_OF_A_DECODER = {"position_ids", "encoder_hidden_states"}
"""Parameters of a decoder that takes position ids."""
_CAPACITY = "expert_capacity"


class Seq2Seq:
    """A model of the seq2seq mapping, in two halves.

    The encoder is transformers' own, with its own attention, and sees one input at a time: no padding, and positions from 0. The
    decoder gets a packed row, with the positions that `positions` is given.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.encoder: Any = model.get_encoder()
        self.positions = GivenPositions()
        own = set(self.encoder.modules())
        self.decoder_modules = {name: module for name, module in model.named_modules() if module not in own}
        """All modules that do not belong to the encoder, by name."""
        self._configs = _attention_configs(self.encoder)
        self._blank: Any = None
        """The encoder's output for a token."""
        self.positions.pass_to(self._decoders_with_position_ids())
        _let_every_token_in(self.decoder_modules.values())

    @property
    def num_encoder_ids(self) -> int:
        """The encoder's token ids are 0 … this − 1."""
        return int(self.encoder.get_input_embeddings().num_embeddings)

    def encode(self, input_ids: torch.Tensor) -> Any:
        """The encoder's output for one input [1, L], as the model takes it; its first field is [1, L, size]. On the meta device
        without attention, whose masks need values."""
        if input_ids.is_meta:
            with bound(self.encoder.modules(), placeholder):
                return self.encoder(input_ids=input_ids, use_cache=False)
        with self._own_attention():
            # Without a mask some encoders make one that hides tokens with the id of the padding.
            return self.encoder(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))

    def blank_output(self, num_tokens: int, device: torch.device) -> Any:
        """An output of the encoder that is zero, [1, num_tokens, size]."""
        if self._blank is None:
            with torch.inference_mode():
                self._blank = self.encode(torch.zeros(1, 1, dtype=torch.int64, device=device))
        states = torch.zeros_like(self._blank[0]).repeat(1, num_tokens, 1)
        return type(self._blank)(last_hidden_state=states)

    def inputs(self, input_ids: torch.Tensor, encoder_output: Any) -> dict[str, Any]:
        """Arguments of the model for a row of the decoder [1, T]; to be called within `positions.at`."""
        return {"decoder_input_ids": input_ids, "encoder_outputs": encoder_output, "use_cache": False}

    def decode(self, input_ids: torch.Tensor, position_ids: torch.Tensor, encoder_output: Any) -> torch.Tensor:
        """The logits of a row [1, T, vocab_size], with the attention that the modules are bound to."""
        with self.positions.at(position_ids):
            logits: torch.Tensor = self.model(**self.inputs(input_ids, encoder_output)).logits
        return logits

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Let the modules use transformers' own attention inside. Encoder and decoder of some models have the same config."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = "eager"
        try:
            yield
        finally:
            for config, earlier in zip(self._configs, before, strict=True):
                config._attn_implementation = earlier

    def _decoders_with_position_ids(self) -> list[torch.nn.Module]:
        """The outermost of the decoder's modules that take position ids with the encoder's output, if any. Modules around the
        encoder take the positions of its input."""
        prefix = next(name for name, module in self.model.named_modules() if module is self.encoder)
        around = {name for name in self.decoder_modules if not name or prefix.startswith(f"{name}.")}
        taking = (
            module
            for name, module in self.decoder_modules.items()
            if name not in around and inspect.signature(module.forward).parameters.keys() >= _OF_A_DECODER
        )
        return list(taking)[:1]


def _attention_configs(module: torch.nn.Module) -> list[Any]:
    """The configs from which the modules take their attention implementation."""
    configs = [getattr(each, "config", None) for each in module.modules()]
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def _let_every_token_in(modules: Any) -> None:
    """Routers of some mixtures of experts drop the tokens of a row that one expert gets too many of. `generate` gives a decoder one
    token at a time and so drops none; of a packed row the last sequences would be dropped."""
    for module in modules:
        if isinstance(getattr(module, _CAPACITY, None), int):
            setattr(module, _CAPACITY, _NO_LIMIT)


_BIAS = "position_bias"
_WATCHED_TOKENS = 3
_WATCHED_STATES = 5
"""Length of the encoder's output: another one than that of the row, so that cross attention shows."""


def find_decoder_layers(seq2seq: Seq2Seq, device: torch.device) -> list[AttentionLayer]:
    """All modules that call attention_forward when the decoder runs, in the order of calls, without their biases. Raises
    UnsupportedModel."""
    row = torch.arange(_WATCHED_TOKENS, device=device)[None]
    output = seq2seq.blank_output(_WATCHED_STATES, device)
    layers = record_layers(
        seq2seq.model, lambda: seq2seq.decode(row, row, output), _WATCHED_TOKENS, num_states=_WATCHED_STATES
    )
    if not any(layer.needs.is_cross for layer in layers):
        raise UnsupportedModel(f"{type(seq2seq.model).__name__}: no module attends to the encoder's output.")
    return layers


def fix_positions(
    seq2seq: Seq2Seq, layers: Sequence[AttentionLayer], texts: tuple[torch.Tensor, torch.Tensor], max_model_len: int
) -> list[AttentionLayer]:
    """Make the decoder take the positions that it is given, up to max_model_len tokens; returns its layers with their biases.

    texts: two rows of token ids [1, T] without a special meaning that differ everywhere. Call it once for a model.
    """
    device = texts[0].device
    output = seq2seq.blank_output(_WATCHED_STATES, device)
    with bound(seq2seq.decoder_modules.values(), placeholder), torch.inference_mode():
        # As transformers computes it, with its own positions.
        tables = find_position_tables(
            seq2seq.decoder_modules,
            lambda row: seq2seq.model(**seq2seq.inputs(row, output)),
            texts,
            max_model_len,
        )
    seq2seq.positions.install(tables)
    biased = _with_biases(seq2seq, layers, output, max_model_len)
    for layer in biased:
        if layer.needs.has_bias and _BIAS in inspect.signature(layer.module.forward).parameters:
            layer.module.register_forward_pre_hook(_without_bias(seq2seq.positions), with_kwargs=True)
    return biased


def _without_bias(positions: GivenPositions) -> Callable[[torch.nn.Module, Any, dict[str, Any]], Any]:
    """Some modules compute their bias if they are given none, for all pairs of places of the row. In a packed row that is of no
    use, so they are given one number."""

    def hook(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if positions.ids is None or kwargs.get(_BIAS) is not None:
            return args, kwargs
        return args, {**kwargs, _BIAS: torch.zeros(1, 1, 1, 1)}

    return hook


def _with_biases(
    seq2seq: Seq2Seq, layers: Sequence[AttentionLayer], output: Any, max_model_len: int
) -> list[AttentionLayer]:
    """The layers with their biases, as the last token of the longest text gets them from transformers: one row has all
    distances."""
    if not any(layer.needs.has_bias for layer in layers):
        return list(layers)
    biases: dict[torch.nn.Module, torch.Tensor] = {}

    def note_bias(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        if call.bias is not None:
            biases[module] = call.bias
        return placeholder(module, query, key, value, call)

    cache = EncoderDecoderCache(_LongText(max_model_len), DynamicCache())
    token = torch.zeros(1, 1, dtype=torch.int64, device=output[0].device)
    with bound(seq2seq.decoder_modules.values(), note_bias), torch.inference_mode():
        seq2seq.model(**seq2seq.inputs(token, output), past_key_values=cache)
    tables: list[torch.Tensor] = []
    completed: list[AttentionLayer] = []
    for layer in layers:
        if not layer.needs.has_bias:
            completed.append(layer)
            continue
        bias = biases.get(layer.module)
        needed = [1, layer.needs.num_heads, 1, max_model_len]
        shape = None if bias is None else list(bias.shape)
        if bias is None or shape != needed:
            raise UnsupportedModel(f"{layer.name} adds a bias {shape} to the scores of one token; needed: {needed}.")
        # Layers with equal tables get the same one, so that a step looks its biases up once.
        table = bias[0, :, 0].flip(-1).contiguous()
        table = next((earlier for earlier in tables if torch.equal(earlier, table)), table)
        tables.append(table)
        completed.append(layer._replace(distance_bias=table))
    return completed


class _LongText(DynamicCache):  # type: ignore[misc]
    """A cache that has all tokens of the longest text but the last one, and no memory for them."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__()
        self._length = max_model_len

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (states.expand(-1, -1, self._length, -1) for states in (key_states, value_states))
        return key, value
