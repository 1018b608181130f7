"""What a model needs, told without its weights, is what it needs with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.forward.modules import modules_of, tensor_bytes
from kvpool.worker_service.model.memory.facts import facts_of_meta_model, kv_bytes_per_token
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from tests.model.paged import load
from tests.tiny_models import build_model, make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "deepseek_v3"])
def test_weights_and_kv_are_those_of_the_loaded_model(architecture: str, tmp_path: Path) -> None:
    loaded = load(make_tiny_model(architecture, tmp_path).path)
    meta_model = build_meta_model(AutoConfig.from_pretrained(tmp_path))
    assert meta_model.weight_bytes(torch.float32, CPU) == tensor_bytes(modules_of(loaded.runtime))
    assert [layer.needs for layer in meta_model.layers] == [layer.needs for layer in loaded.layers]
    assert kv_bytes_per_token(meta_model.layers, torch.float32) == kv_bytes_per_token(loaded.layers, torch.float32)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_an_architecture_runs_without_values(architecture: str) -> None:
    """Activations grow with the tokens, and never without bound."""
    model = build_model(architecture, 0)
    meta_model = build_meta_model(model.config)
    assert meta_model.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    few, many = (meta_model.activation_bytes(torch.bfloat16, tokens, 4) for tokens in (512, 4096))
    assert 7 * few < many < 9 * few
    assert all(parameter.device.type == "meta" for parameter in meta_model.model.parameters())


def test_activations_of_one_layer_by_hand() -> None:
    """What is alive at once in an MLP: its input twice (it is added again), gate, its activation, up."""
    config = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=32, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=4
    )
    meta_model = build_meta_model(config)
    tokens = 1000
    by_hand = tokens * 2 * 3 * 4096
    assert by_hand <= meta_model.activation_bytes(torch.bfloat16, tokens, 1) <= by_hand + tokens * 2 * 32 * 20


def test_logits_are_counted_with_what_sampling_makes_of_them() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=100_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    meta_model = build_meta_model(config)
    assert meta_model.activation_bytes(torch.bfloat16, 64, 64) >= 64 * 100_000 * (2 + 8 + 4 + 4)


def test_a_model_that_cannot_be_drawn_is_an_error_that_says_so() -> None:
    with pytest.raises(UnsupportedModel, match="The needs of bert are unknown"):
        build_meta_model(AutoConfig.for_model("bert", hidden_size=8, num_attention_heads=3))


def test_facts_without_weights_leave_room_for_them() -> None:
    meta_model = build_meta_model(build_model("llama", 0).config)
    facts = facts_of_meta_model(meta_model, torch.float32, CPU, MemorySettings(16))
    assert facts.weight_bytes == meta_model.weight_bytes(torch.float32, CPU)
    assert facts.free_bytes == facts.total_bytes - facts.other_bytes - facts.weight_bytes
