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


@dataclass(frozen=True, slots=True)
class Cost:
    """The least memory traffic and computation of a step."""

    num_bytes: int
    """Weights once, and the KV of every sequence once."""
    num_flop: int
    """Of the products with weights and of attention."""


def cost(model: Any, num_sequences: int, num_new: int, num_before: int) -> Cost:
    """The work of a step in which each sequence computes num_new tokens after num_before, and samples after the last."""
    config = model.config
    dtype_size = next(model.parameters()).element_size()
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    # A step reads a few rows of the embeddings, unless the head shares them.
    num_all = sum(parameter.numel() for parameter in model.parameters())
    num_read = num_all - (0 if head is embeddings else embeddings.numel())
    num_in_layers = num_read - head.numel()
    num_tokens, num_keys = num_sequences * num_new, num_sequences * (num_before + num_new)
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # New token i sees num_before + i + 1 keys; a score and its share of the output take head_dim products each.
    pairs = num_sequences * (num_new * num_before + num_new * (num_new + 1) // 2)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return Cost(
        num_bytes=dtype_size * (num_read + num_keys * kv_numbers),
        num_flop=2 * (num_tokens * num_in_layers + num_sequences * head.numel()) + attention,
    )
