"""The limits of an engine, and the facts of its model."""

from __future__ import annotations

from dataclasses import dataclass

from .policy import SchedulingPolicy
from .prompt import EncoderSettings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    """Prompt and generated tokens of one sequence."""
    eos_token_ids: frozenset[int] = frozenset()
    max_num_seqs: int = 64
    """Sequences in one batch."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step."""
    max_mixed_prefill_tokens: int = 512
    """Prompt tokens in one step while a sequence decodes."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.fcfs
    max_num_waiting: int = 1024
    """Waiting requests; more are refused."""
    max_num_waiting_tokens: int = 1 << 22
    """Prompt tokens of all waiting requests; more are refused, but one prompt may always wait."""
    prefix_caching: bool = True
    encoder: EncoderSettings | None = None
    """None: the prompt is the beginning of the text."""
