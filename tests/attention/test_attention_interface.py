"""What transformers hands over is understood or refused, never dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpool.worker_service.attention.interface import UnsupportedAttention, attention_forward, bind
from kvpool.worker_service.attention.layer import AttentionCall


class Notes:
    """A target that keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        self.calls.append(call)
        return value.transpose(1, 2)


def attend(notes: Notes | None, **kwargs: Any) -> None:
    module = torch.nn.Identity()
    if notes is not None:
        bind(module, notes)
    tensor = torch.zeros(1, 2, 3, 4)
    attention_forward(module, tensor, tensor, tensor, **kwargs)


def test_the_call_reaches_the_target_whole() -> None:
    notes, sinks, bias = Notes(), torch.zeros(2), torch.zeros(1, 2, 3, 3)
    attend(notes, scaling=0.1, sliding_window=8, softcap=30.0, s_aux=sinks, dropout=0.0, position_bias=bias)
    assert notes.calls == [AttentionCall(0.1, 8, 30.0, sinks, bias)]


def test_scaling_defaults_to_that_of_the_head_dim() -> None:
    notes = Notes()
    attend(notes)
    assert notes.calls == [AttentionCall(0.5)]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"attention_mask": torch.zeros(1, 1, 3, 3)},
        {"something_new": 3},
        {"dropout": 0.1},
        {"is_causal": False},
        {"cu_seq_lens_q": torch.zeros(2)},
    ],
)
def test_what_is_not_understood_raises(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedAttention, match="Identity passes"):
        attend(Notes(), **kwargs)


def test_an_unbound_module_raises() -> None:
    with pytest.raises(UnsupportedAttention, match="not bound"):
        attend(None)
