"""The least time of a step or a workload on this machine: what must be read and multiplied, at measured speeds.

A step takes at least the time to read the weights and the KV of its sequences once, or to multiply, whichever is longer. The floor
of a workload is that of its steps: each turn's prompts are computed, nothing twice, and then all sequences decode together. An
engine that multiplies for prompts while it reads for decodes can be faster than this where both occur at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from bench.machine_speed import MachineSpeed
from kvpool.load.plan import CacheCase, LoadPlan


class Cost(NamedTuple):
    """The least memory traffic and computation of a step."""

    num_bytes: int
    """Weights once, and the KV of every block once."""
    num_flop: int
    """Of the products with weights and of attention."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a decoder whose layers are alike."""

    num_layer_weights: int
    """Numbers in all layers together."""
    num_head_weights: int
    bytes_per_number: int
    num_kv_numbers: int
    """Numbers of a token's KV in all layers."""
    num_flop_per_pair: int
    """Of attention for a token and one of its keys, in all layers."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """A transformers model; its weights are not read."""
        config = model.config
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # A step reads a few rows of the embeddings, unless the head shares them.
        num_all = sum(parameter.numel() for parameter in model.parameters())
        num_read = num_all - (0 if head is embeddings else embeddings.numel())
        # A score and its share of the output take head_dim products each.
        return cls(
            num_layer_weights=num_read - head.numel(),
            num_head_weights=head.numel(),
            bytes_per_number=head.element_size(),
            num_kv_numbers=2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
            num_flop_per_pair=4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )

    @classmethod
    def of_folder(cls, folder: Path, dtype: str) -> Self:
        """Of a model's folder: its config alone is read."""
        import torch  # here: it takes seconds
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return cls.of(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)))

    def cost(self, num_sequences: int, num_new: int, num_before: int, num_shared: int = 0, num_rows: int = 1) -> Cost:
        """Of a step in which each sequence computes `num_new` tokens after `num_before`, of which `num_shared` are in blocks of all
        of them, and needs the logits of `num_rows`."""
        num_keys = num_shared + num_sequences * (num_before + num_new - num_shared)
        # New token i has num_before + i + 1 keys.
        num_pairs = num_sequences * (num_new * num_before + num_new * (num_new + 1) // 2)
        num_products = num_sequences * (num_new * self.num_layer_weights + num_rows * self.num_head_weights)
        num_read = self.num_layer_weights + self.num_head_weights + num_keys * self.num_kv_numbers
        return Cost(self.bytes_per_number * num_read, 2 * num_products + self.num_flop_per_pair * num_pairs)

    def workload_floor_s(self, plan: LoadPlan, case: CacheCase, speed: MachineSpeed) -> float:
        """Of a run in which all users begin at once, one conversation each."""
        sizes, users = plan.sizes, plan.num_conversations
        # Of a warm prompt all is cached but the last token, which gives the first logits.
        own = sizes.own_tokens if case is CacheCase.COLD else 1
        before = sizes.prefix_tokens + sizes.own_tokens - own
        costs = []
        if case is CacheCase.COLD and sizes.prefix_tokens:
            costs.append(self.cost(1, sizes.prefix_tokens, 0, num_rows=0))
        for _ in range(sizes.turns):
            costs.append(self.cost(users, own, before, sizes.prefix_tokens))
            before += own
            for _ in range(sizes.generated_tokens - 1):
                costs.append(self.cost(users, 1, before, sizes.prefix_tokens))
                before += 1
            own = sizes.own_tokens + 1  # and the last token of the answer, which is not computed yet
        return sum(speed.floor_s(*cost) for cost in costs)
