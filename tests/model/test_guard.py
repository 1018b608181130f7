"""Models that paged attention would compute wrongly are refused, and the message helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvpool.worker_service.attention.layer import LayerNeeds
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.forward.layers import AttentionLayer
from kvpool.worker_service.model.guard.self_check import relative_difference
from kvpool.worker_service.model.guard.support import check_config, check_layers
from tests.model.paged import load
from tests.tiny_models import build_model, make_tiny_model

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config(kind: str, **fields: Any) -> Any:
    return AutoConfig.for_model(kind, **{**TINY, **fields})


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **fields}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("whisper", {}, "no sequence-to-sequence language model"),
        ("led", {}, "not with transformers' AttentionInterface"),
        ("bloom", {}, "not with transformers' AttentionInterface"),
        ("llama4_text", {}, "in chunks of"),
        ("deepseek_v32", {}, "layers of type indexed_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("clip_text_model", {}, "no causal language model"),
        ("llama", {"rope_parameters": rope("dynamic", original_max_position_embeddings=32)}, "--max-model-len 32"),
    ],
)
def test_refused_by_config(kind: str, fields: dict[str, Any], message: str) -> None:
    """Before any weights are read."""
    with pytest.raises(UnsupportedModel, match=message):
        check_config(config(kind, **fields), max_model_len=64)


def test_rope_by_longest_is_served_where_no_sequence_can_be_that_long() -> None:
    check_config(config("llama", rope_parameters=rope("dynamic", original_max_position_embeddings=32)), 32)


def test_the_probe_sees_a_model_that_goes_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions replaced by 0, 1, 2, … of the packed row."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    forward = LlamaRotaryEmbedding.forward

    def from_zero(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.shape[1])[None])

    build_model("llama", 0).save_pretrained(tmp_path)
    load(tmp_path)
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", from_zero)
    with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
        load(tmp_path)


def layers(*windows: int | None) -> list[AttentionLayer]:
    return [
        AttentionLayer(f"layer{i}", torch.nn.Identity(), LayerNeeds(2, 2, 8, 8, window=window))
        for i, window in enumerate(windows)
    ]


def test_a_layer_that_does_not_reach_attention_is_missed() -> None:
    with pytest.raises(UnsupportedModel, match="has 2 layers that attend, but 1 modules reach attention"):
        check_layers(config("llama"), layers(None), 64)


def test_a_window_that_is_in_the_mask_only_is_refused() -> None:
    windowed = config("mistral", sliding_window=8)
    check_layers(windowed, layers(8, 8), 64)
    with pytest.raises(UnsupportedModel, match="in the mask only"):
        check_layers(windowed, layers(None, None), 64)
    check_layers(windowed, layers(None, None), 8)


@pytest.mark.parametrize(("kind", "window"), [("mistral", 1), ("mistral", 0), ("gemma2", 1), ("gemma2", -1)])
def test_a_window_of_one_token_is_refused_before_weights_are_read(kind: str, window: int, tmp_path: Path) -> None:
    """With a window of 0 the guard's own pass would divide by zero, which ends the process."""
    path = make_tiny_model(kind, tmp_path).path
    content = json.loads((path / "config.json").read_bytes())
    (path / "config.json").write_text(json.dumps(content | {"sliding_window": window}))
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=rf"has a sliding window of {window} tokens; needed: 2 or more"):
        load(path)


def test_layer_types_and_windows_must_agree() -> None:
    mixed = config("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    check_layers(mixed, layers(None, 8), 64)
    with pytest.raises(UnsupportedModel, match="should have the window 8 by the config"):
        check_layers(mixed, layers(None, None), 64)


def test_relative_difference_is_of_what_varies() -> None:
    """A constant added to all logits is no signal to compare with."""
    reference = torch.tensor([[1000.0, 1001.0, 999.0]])
    ours = reference + torch.tensor([[0.0, 0.1, -0.1]])
    assert relative_difference(ours, reference) == pytest.approx(0.1, rel=1e-3)
    assert not relative_difference(ours * float("nan"), reference) <= 1.0
