"""Shapes of models: random weights take as much time as trained ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool.worker_service.attention.interface import ATTENTION_NAME, register

MAX_MODEL_LEN: Final = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama of some size."""

    name: str
    fields: tuple[tuple[str, Any], ...]
    """Of its config."""

    def config(self) -> Any:
        return AutoConfig.for_model("llama", **_COMMON, **dict(self.fields))


_COMMON: Final[dict[str, Any]] = {
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _shape(
    name: str, vocab: int, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, *, tied: bool
) -> Shape:
    fields = {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }
    return Shape(name, tuple(fields.items()))


_SHAPES: Final = (
    _shape("1B", 128_256, 16, 2048, 8192, 32, 8, tied=True),
    _shape("8B", 128_256, 32, 4096, 14_336, 32, 8, tied=False),
)
_TINY: Final = (_shape("tiny", 512, 2, 64, 128, 4, 2, tied=True),)


def shapes(is_tiny: bool) -> tuple[Shape, ...]:
    """Those of Llama 3.2 1B and Llama 3.1 8B."""
    return _TINY if is_tiny else _SHAPES


def build(shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with random weights, created on the device."""
    register()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval()
