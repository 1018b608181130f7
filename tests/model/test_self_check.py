"""The probe sees whatever makes a token's logits depend on more than the tokens before it in its own text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from kvpool.worker_service.attention.interface import ATTENTION_NAME, register
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.guard.self_check import random_sequences
from kvpool.worker_service.model.guard.support import guarded_modules
from tests.tiny_models import build_model

MAX_MODEL_LEN = 64
WINDOW = 8
_mlp: Callable[..., torch.Tensor] = LlamaMLP.forward
_attention: Callable[..., Any] = LlamaAttention.forward


def token_before(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As token shifts and short convolutions do."""
    return _mlp(self, x + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def mean_of_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _mlp(self, x - 0.1 * x.mean(dim=1, keepdim=True))


def length_of_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _mlp(self, x * (1 + 0.001 * x.shape[1]))


def place_in_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As positions counted with arange."""
    return _mlp(self, x * (1 + 0.001 * torch.arange(x.shape[1])[:, None]))


def capacity_of_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As experts that drop the tokens for which they have no room."""
    result = _mlp(self, x)
    result[:, 28:] = 0
    return result


def state_between_steps(self: Any, x: torch.Tensor) -> torch.Tensor:
    state = getattr(self, "state", 0.0)
    self.state = 0.9 * state + 0.1 * x[:, -1:]
    return _mlp(self, x + state)


MISTAKES = [token_before, mean_of_row, length_of_row, place_in_row, capacity_of_row, state_between_steps]


@pytest.fixture
def model() -> Any:
    register()
    model = build_model("llama", 0)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval()


def check(model: Any) -> None:
    guarded_modules(model, model.config, torch.float32, torch.device("cpu"), MAX_MODEL_LEN, is_thorough=True)


def test_a_model_that_looks_at_its_own_text_alone_passes(model: Any) -> None:
    check(model)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake.__name__))
def test_what_depends_on_the_row_is_seen(
    model: Any, mistake: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", mistake)
    with pytest.raises(UnsupportedModel, match="computes other logits over paged KV"):
        check(model)


def test_a_single_row_that_differs_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last layer, so that no later row shows it."""
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
    """The model tells attention a window, and has one in its own mask."""

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
