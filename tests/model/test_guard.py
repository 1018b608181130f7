"""Models that paged attention would compute wrongly are refused, by config or by what they compute, and the message helps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from kvpool.worker_service.attention.interface import ATTENTION_NAME, register
from kvpool.worker_service.attention.layer import LayerNeeds
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.forward.layers import AttentionLayer
from kvpool.worker_service.model.guard.self_check import random_sequences, relative_difference
from kvpool.worker_service.model.guard.support import check_config, check_layers, guarded
from tests.model.paged import load
from tests.tiny_models import COMMON, build_model, edit_json, make_tiny_model


def config(kind: str, **fields: Any) -> Any:
    return AutoConfig.for_model(kind, **{**COMMON, "max_position_embeddings": 64, **fields})


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
    with pytest.raises(UnsupportedModel, match=message):
        check_config(config(kind, **fields), max_model_len=64)


def test_rope_by_longest_is_served_where_no_sequence_can_be_that_long() -> None:
    check_config(config("llama", rope_parameters=rope("dynamic", original_max_position_embeddings=32)), 32)


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
    edit_json(path / "config.json", sliding_window=window)
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


# -- the probe sees whatever makes a token's logits depend on more than the tokens before it in its text


LONGEST = 64
WINDOW = 8
_mlp: Callable[..., torch.Tensor] = LlamaMLP.forward
_attention: Callable[..., Any] = LlamaAttention.forward


def capacity_of_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As experts that drop the tokens for which they have no room."""
    result = _mlp(self, x)
    result[:, 28:] = 0
    return result


def state_between_steps(self: Any, x: torch.Tensor) -> torch.Tensor:
    state = getattr(self, "state", 0.0)
    self.state = 0.9 * state + 0.1 * x[:, -1:]
    return _mlp(self, x + state)


MISTAKES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    # as token shifts and short convolutions do
    "the token before": lambda self, x: _mlp(self, x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]),
    "the mean of the row": lambda self, x: _mlp(self, x - 0.1 * x.mean(dim=1, keepdim=True)),
    "the length of the row": lambda self, x: _mlp(self, x * (1 + 0.001 * x.shape[1])),
    # as positions counted with arange
    "the place in the row": lambda self, x: _mlp(self, x * (1 + 0.001 * torch.arange(x.shape[1])[:, None])),
    "the capacity of the row": capacity_of_row,
    "a state between steps": state_between_steps,
}


@pytest.fixture
def model() -> Any:
    register()
    model = build_model("llama", 0)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


def check(model: Any) -> None:
    guarded(model, model.config, torch.float32, torch.device("cpu"), LONGEST, is_thorough=True)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_depends_on_the_row_is_seen(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", MISTAKES[name])
    with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
        check(model)


def test_a_single_row_that_differs_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last layer, so that no later row shows it. Without it the model passes."""
    check(model)
    last = model.model.layers[-1].mlp

    def second_of_row(x: torch.Tensor) -> torch.Tensor:
        result = _mlp(last, x)
        result[:, 1:2] *= 2
        return result

    monkeypatch.setattr(last, "forward", second_of_row)
    with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
        check(model)


@pytest.mark.parametrize("told", [WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_window_that_is_one_off_is_seen(model: Any, told: int, monkeypatch: pytest.MonkeyPatch) -> None:

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if self.config._attn_implementation == ATTENTION_NAME:
            return _attention(self, hidden_states, **kwargs, sliding_window=told)
        length = hidden_states.shape[1]
        seen = torch.ones(length, length).tril().triu(1 - WINDOW)
        kwargs["attention_mask"] = torch.zeros(length, length).masked_fill(seen == 0, float("-inf"))[None, None]
        return _attention(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    if told == WINDOW:
        check(model)
    else:
        with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
            check(model)


def test_what_a_config_gives_a_meaning_is_not_among_the_random_tokens(model: Any) -> None:
    """Padding, say, may change positions."""
    model.config.pad_token_id, model.config.eos_token_id = 5, [6, 7]
    (drawn,) = random_sequences(model.config, [5000])
    assert set(range(model.config.vocab_size)) - set(drawn) == {5, 6, 7}
