"""Measures the memory of a maximum batch by running it, before the KV cache is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from ...step import EncoderBlocks, PromptRows, SamplingParams, SequencePart, StateBlocks, Step
from ..errors import KVCacheTooLarge, ModelError
from ..forward.kv_plan import CrossPlan, KVCachePlan, StatesPlan
from ..forward.runner import ModelRunner
from ..settings import MemorySettings

_GREEDY_OF_MEMORY = SamplingParams(temperature=1.0, top_p=0.9, num_logprobs=1)
"""Sampling that sorts and normalises all logits."""
_CONTEXT_TOKENS = 65_536
"""Tokens that the decodes of the measured batch read in all; attention's workspace is proportional to them."""
_SEARCH_STEP = 64
"""Precision in tokens of the recommended budget, if the given one is too large."""


class BatchNeeds(NamedTuple):
    """Memory of a maximum batch without weights and KV, in bytes."""

    activations: int
    workspace_per_token: int
    """Bytes in addition for each token that the batch's decodes read."""


MakeRunner = Callable[[KVCachePlan], ModelRunner]


def measure_batch(
    make_runner: MakeRunner,
    meter: CUDAMeter,
    settings: MemorySettings,
    max_model_len: int,
    bytes_per_token: int,
    state_bytes: int = 0,
    cross: CrossPlan | None = None,
) -> BatchNeeds:
    """Run the largest batches that the engine may schedule. Blocking, some seconds on a GPU.

    Their KV is in a small cache that is freed afterwards. Raises ModelError with a smaller --max-num-batched-tokens that fits, if
    there is one.
    """

    def run(num_tokens: int) -> BatchNeeds | None:
        batches = MaximumBatches(
            num_tokens,
            min(settings.max_num_seqs, num_tokens),
            max_model_len,
            settings.block_size,
            bytes_per_token,
            state_bytes,
            cross,
        )
        try:
            return _run(make_runner, meter, batches)
        except (torch.OutOfMemoryError, KVCacheTooLarge):
            return None

    limit = settings.max_num_batched_tokens
    if (needs := run(limit)) is not None:
        return needs
    meter.release()
    fitting = largest_that_fits(lambda num_tokens: run(num_tokens) is not None, settings.max_num_seqs, limit)
    advice = (
        f"--max-num-batched-tokens {fitting} fits"
        if fitting
        else "give a smaller --max-num-seqs, or take a smaller model or a device with more memory"
    )
    raise ModelError(
        f"A maximum batch of {limit} tokens and {settings.max_num_seqs} sequences does not fit into the memory with the "
        f"weights: {advice}."
    )


def largest_that_fits(fits: Callable[[int], bool], least: int, too_many: int) -> int | None:
    """A number in least … too_many − 1 that fits, while the number plus _SEARCH_STEP does not; None if least does not."""
    if least >= too_many or not fits(least):
        return None
    while too_many - least > _SEARCH_STEP:
        middle = (least + too_many) // 2
        if fits(middle):
            least = middle
        else:
            too_many = middle
    return least


def _run(make_runner: MakeRunner, meter: CUDAMeter, batches: MaximumBatches) -> BatchNeeds:
    meter.release()
    runner = make_runner(batches.plan())
    try:
        activations = 0
        for step in (batches.prompts(), batches.late_chunk(), batches.prompt_with_logprobs()):
            meter.reset()
            runner.execute(step)
            activations = max(activations, meter.reserved_bytes())
        peaks: list[int] = []
        for context in (0, batches.decode_context):
            meter.reset()
            runner.execute(batches.decodes(context))
            peaks.append(meter.allocated_bytes())
        num_read = batches.decode_context * batches.num_seqs
        per_token = -(-max(0, peaks[1] - peaks[0]) // num_read) if num_read else 0
        return BatchNeeds(activations, per_token)
    finally:
        runner.close()
        del runner
        meter.release()


class MaximumBatches:
    """The steps that need the most memory. Their sequences read the same block repeatedly, so that a small cache is enough."""

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int,
        max_model_len: int,
        block_size: int,
        bytes_per_token: int,
        state_bytes: int = 0,
        cross: CrossPlan | None = None,
    ) -> None:
        """bytes_per_token, state_bytes: K and V of all layers, and the states of a sequence; 0: there are none."""
        self._num_tokens = num_tokens
        self.num_seqs = num_seqs
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._bytes_per_token, self._state_bytes, self._cross = bytes_per_token, state_bytes, cross
        self.num_blocks = 3 + num_tokens // block_size + num_seqs
        """Blocks of their cache: the null block, the one that is read, and those that are written."""
        each = min(max_model_len - 1, max(block_size, _CONTEXT_TOKENS // num_seqs))
        self.decode_context = each // block_size * block_size
        """Tokens that each measured decode reads."""

    def plan(self) -> KVCachePlan:
        """The plan of their cache. Its states are the null block, the one that is read, and one for each sequence. All sequences
        share one input of the encoder, of the greatest length."""
        states = StatesPlan(2 + self.num_seqs, self._state_bytes) if self._state_bytes else None
        cross, size, num_bytes = self._cross, self._block_size, self._bytes_per_token
        if cross is not None:
            cross = replace(cross, num_blocks=1 + cross.blocks_per_input(size))
        return KVCachePlan.one_group(self.num_blocks, size, num_bytes, states, cross, attends=num_bytes > 0)

    def prompts(self) -> Step:
        """The step with the most tokens and rows of logits."""
        each, more = divmod(self._num_tokens, self.num_seqs)
        lengths = [min(self._max_model_len, each + (index < more)) for index in range(self.num_seqs)]
        return self._step([(0, length) for length in lengths])

    def late_chunk(self) -> Step:
        """One chunk at the end of the longest sequence."""
        length = min(self._num_tokens, self._max_model_len)
        return self._step([(self._max_model_len - length, length)])

    def prompt_with_logprobs(self) -> Step:
        """One prompt with log-probabilities."""
        length = min(self._num_tokens, self._max_model_len)
        (part,) = self._step([(0, length)]).parts
        rows = PromptRows(0, [0] * (length - 1), num_top=1)
        return Step([part._replace(prompt_rows=rows if length > 1 else None)])

    def decodes(self, context: int) -> Step:
        """One token of every sequence, after `context` others each."""
        return self._step([(context, 1)] * self.num_seqs)

    def _encoder(self, brings: bool) -> EncoderBlocks | None:
        """brings: whether the encoder is to run."""
        if self._cross is None:
            return None
        num_tokens = self._cross.max_tokens
        table = list(range(1, 1 + -(-num_tokens // self._block_size)))
        return EncoderBlocks(table, num_tokens, [0] * num_tokens if brings else ())

    def _step(self, chunks: list[tuple[int, int]]) -> Step:
        """chunks: (first position, number of tokens)."""
        parts: list[SequencePart] = []
        next_block = 2
        for start, length in chunks:
            num_read = start // self._block_size
            num_own = -(-(start + length) // self._block_size) - num_read
            table = [1] * num_read + list(range(next_block, next_block + num_own))
            next_block += num_own
            state = StateBlocks(1 if start else 0, 2 + len(parts)) if self._state_bytes else None
            tables = (table,) if self._bytes_per_token else ()
            encoder = self._encoder(brings=start == 0 and not parts)
            parts.append(SequencePart([0] * length, start, tables, _GREEDY_OF_MEMORY, state=state, encoder=encoder))
        return Step(parts)


class CUDAMeter:
    """Measures allocations on a GPU, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = 0

    def reset(self) -> None:
        """Restart the measurement; present allocations do not count."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated = torch.cuda.memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        """Largest amount reserved from the device since reset, beyond the allocations of that time."""
        return self._peak("reserved_bytes.all.peak")

    def allocated_bytes(self) -> int:
        """Largest amount in tensors since reset, beyond the allocations of that time."""
        return self._peak("allocated_bytes.all.peak")

    def release(self) -> None:
        """Return unused memory to the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _peak(self, name: str) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.memory_stats(self._device)[name]) - self._allocated
