"""A model's description is what the model computes; a model that the description cannot express is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvpool.worker_service.model.errors import NotNative
from kvpool.worker_service.model.forward.layers import find_attention_layers
from kvpool.worker_service.model.guard.tiny_replica import build_replica
from kvpool.worker_service.model.native import load as native_load
from kvpool.worker_service.model.native.recognition import describe
from kvpool.worker_service.native.cpu.selection import load_step
from kvpool.worker_service.native.description import ModelDescription
from scripts.models.subjects import default_config
from tests.tiny_models import COMMON

CPU = torch.device("cpu")
LENGTH = 64
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128}


def tiny(kind: str, **fields: Any) -> Any:
    return build_replica(AutoConfig.for_model(kind, **{**COMMON, **SIZES, **fields}))


def described(model: Any, dtype: torch.dtype = torch.float32) -> ModelDescription:
    return describe(model, find_attention_layers(model, CPU), dtype, LENGTH)


# Types that the tests' tiny models lack, and settings of published models that the default configs lack.
TYPES = (
    *("biogpt", "cohere", "cohere2", "gemma3_text", "glm4", "hunyuan_v1_dense", "nanochat"),
    *("nemotron", "olmo", "persimmon", "smollm3"),
)
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"use_qk_norm": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("stablelm", {"use_parallel_residual": True}),
]


@pytest.mark.native
@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in TYPES), *SETTINGS], ids=str)
def test_a_recognised_model_computes_what_transformers_computes(kind: str, settings: dict[str, Any]) -> None:
    """The check at load, of a small model with the published one's rules."""
    config = default_config(kind)
    for name, value in settings.items():
        setattr(config, name, value)
    native_load._check_replica(config, load_step("float32", print), LENGTH)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("cohere", {"use_qk_norm": True}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("granite", {"residual_multiplier": 0.22, "embedding_multiplier": 12.0}),
        ("hunyuan_v1_dense", {}),
        ("gpt_neox", {}),
        ("biogpt", {}),
        ("olmo2", {}),
    ],
)
def test_a_model_in_bfloat16_is_recognised_as_in_float32(kind: str, settings: dict[str, Any]) -> None:
    """Its small model is tried in float32, so both must lead to the same step."""
    whole, rounded = tiny(kind, **settings), tiny(kind, **settings)
    for module in (rounded, *rounded.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(parameter.to(torch.bfloat16), requires_grad=False))
    one, other = described(whole), described(rounded, torch.bfloat16)
    assert_alike(replace(one, dtype=torch.bfloat16), other)


def assert_alike(one: Any, other: Any) -> None:
    """But for the rounding of weights."""
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-2, check_dtype=False)
    elif isinstance(one, torch.nn.Module):
        assert type(one) is type(other)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-4)
    elif is_dataclass(one):
        for part in fields(one):
            assert_alike(getattr(one, part.name), getattr(other, part.name))
    elif isinstance(one, tuple | list):
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right)
    else:
        assert one == other


def test_a_table_is_kept_once_for_all_layers_that_rotate_by_it() -> None:
    """Gemma-3's windows have another one than its full attention."""
    kinds = ["sliding_attention", "full_attention"] * 2
    layers = described(tiny("gemma3_text", num_hidden_layers=4, layer_types=kinds, sliding_window=8)).layers
    tables = [layer.attention.rotary.cos for layer in layers if layer.attention.rotary is not None]
    assert tables[0] is tables[2] is not tables[1] is tables[3]
    assert not torch.equal(tables[0], tables[1])


def on_gates(model: Any, hook: Callable[..., Any]) -> None:
    """As gpt-oss clamps them in its experts."""
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_pre_hook(hook)


MLP = "its MLP is none of up, activation, down"
RESIDUAL = "its layers do more to the residual than"
CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: on_gates(model, lambda _, inputs: (inputs[0].clamp(max=30),)), MLP),
    (lambda m: m.model.layers[0].register_forward_hook(lambda _, __, out: out + 0.01 * out.roll(1, -1)), RESIDUAL),
    (lambda m: m.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out * 0.9), RESIDUAL),
    (lambda m: m.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)), "its head gets other numbers"),
    (
        lambda m: m.model.layers[1].mlp.register_parameter("extra", torch.nn.Parameter(torch.ones(3))),
        "weights other than those of linear layers and norms, such as mlp.extra",
    ),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=["gate", "output", "last layer", "head", "weights"])
def test_what_the_step_does_not_know_is_refused(change: Callable[[Any], object], reason: str) -> None:
    model = tiny("llama")
    described(model)
    change(model)
    with pytest.raises(NotNative, match=reason):
        described(model)


def test_a_clamp_that_usual_numbers_do_not_reach_is_refused() -> None:
    """OLMo's clip_qkv: no comparison of logits would show it."""
    assert described(tiny("olmo", clip_qkv=None))
    with pytest.raises(NotNative, match="its values are not the outputs of a linear layer"):
        described(tiny("olmo", clip_qkv=30.0))


def test_queries_that_are_scaled_late_in_a_text_are_refused() -> None:
    """Ministral-3's: texts up to the original length run natively, for longer ones the step would be wrong."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    assert described(tiny("ministral3", rope_parameters={**rope, "original_max_position_embeddings": LENGTH}))
    with pytest.raises(NotNative, match="its queries are not the outputs of a linear layer"):
        described(tiny("ministral3", rope_parameters={**rope, "original_max_position_embeddings": LENGTH // 2}))
