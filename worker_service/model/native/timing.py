"""How long a runtime takes for the requests of a busy worker, measured at load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, NamedTuple, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from ...attention.selection import make_torch
from ...step import SamplingParams, SequencePart, Step
from ..forward.contract import Runtime
from ..forward.kv_cache import KVCache
from ..forward.kv_plan import KVCachePlan
from ..forward.native import NativeRuntime
from ..forward.runner import ModelRunner
from ..guard.self_check import random_sequences
from ..memory.facts import kv_bytes_per_token

Clock = Callable[[], float]
"""Seconds since any moment."""

_PROMPT_TOKENS = 512
_REQUESTS = 8
_PREFILLS, _DECODES = 2, 5
"""Runs, of which the fastest counts: the first one also prepares kernels, and other processes may disturb one."""


class TimedWorkload(NamedTuple):
    """Requests that run together. The model computes each prompt in one step, then a token of every request in each step.

    A prefill alone would not compare runtimes: a user waits for the decodes too, and in them another runtime may be faster. A
    single request would count decodes too much: a worker decodes its requests together, so a step of eight serves each for an
    eighth, while each prefill is its own. Prompts are usually several times longer than answers; here they are four times.
    """

    num_requests: int
    prompt_tokens: int
    generated_tokens: int
    """Tokens generated for each request."""

    @classmethod
    def within(cls, max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int) -> Self:
        """Eight requests of 512 + 128 tokens, or what the limits of a worker allow."""
        prompt = max(1, min(_PROMPT_TOKENS, max_num_batched_tokens, max_model_len * 4 // 5))
        return cls(min(_REQUESTS, max_num_seqs), prompt, max(1, prompt // 4))

    def __str__(self) -> str:
        return f"{self.num_requests} requests of {self.prompt_tokens} + {self.generated_tokens} tokens"


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class StepSeconds:
    """What a runtime takes for the steps of a workload."""

    prefill: Seconds
    """A step of one prompt."""
    decode: Seconds
    """A step with a token of each request."""

    def total(self, workload: TimedWorkload) -> float:
        """Seconds of the whole workload."""
        return workload.num_requests * self.prefill + workload.generated_tokens * self.decode


Measure = Callable[[Runtime, int, TimedWorkload], StepSeconds]
"""Times a runtime, as `measure_runtime` does."""


def measure_runtime(
    runtime: Runtime, block_size: int, workload: TimedWorkload, clock: Clock = time.perf_counter
) -> StepSeconds:
    """Time its steps on the CPU, in the calling thread. The requests share the blocks of one prompt, so that their KV takes little
    memory. The runtime is unbound afterwards. Raises what a forward pass raises."""
    layers, dtype, device = runtime.layers, runtime.dtype, runtime.device
    length, num_requests = workload.prompt_tokens, workload.num_requests
    of_prompt = list(range(1, 1 + -(-length // block_size)))
    plan = KVCachePlan.one_group(1 + len(of_prompt) + num_requests, block_size, kv_bytes_per_token(layers, dtype))
    backend = None
    if not isinstance(runtime, NativeRuntime):
        backend = make_torch(dtype, device, runtime.attention_needs)
    tokens = random_sequences(runtime.config, [length])[0]
    greedy = SamplingParams()
    # The token after the prompt goes into a block of the request's own. If the prompt ends within this block, its last tokens are
    # zeros there, which take as long.
    shared = of_prompt[: length // block_size]
    own = range(1 + len(of_prompt), plan.only_pool.num_blocks)
    prefill = Step([SequencePart(tokens, 0, (of_prompt,), greedy)])
    decode = Step([SequencePart(tokens[-1:], length, ([*shared, block],), greedy) for block in own])
    runner = ModelRunner(runtime, KVCache(plan, layers, dtype, device), backend)
    try:
        return StepSeconds(_fastest(runner, prefill, _PREFILLS, clock), _fastest(runner, decode, _DECODES, clock))
    finally:
        runner.close()


def _fastest(runner: ModelRunner, step: Step, num_runs: int, clock: Clock) -> float:
    def seconds() -> float:
        started = clock()
        runner.execute(step)
        return clock() - started

    return min(seconds() for _ in range(num_runs))
