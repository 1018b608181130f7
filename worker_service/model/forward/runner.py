"""Runs the engine's steps: forward passes over the paged KV, and sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...attention.encoder_tables import EncoderTables, slots_of
from ...attention.layer import AttentionBackend
from ...attention.layout import BlockGroup, PackingError
from ...attention.packing import Packer, Packing, StepSizes
from ...step import (
    BadLogits,
    BeamCandidates,
    PartResult,
    PromptRows,
    RowLogprobs,
    SampledToken,
    SamplingParams,
    SequencePart,
    StateBlocks,
    Step,
)
from ..sampling.adjustment import Draw
from ..sampling.sampler import candidates, prompt_logprobs, sample
from .contract import Runtime
from .kv_cache import KVCache


def states_of(parts: Sequence[SequencePart], num_blocks: int) -> list[StateBlocks]:
    """The state of each part; none if the model has no recurrent layers: num_blocks is 0.

    Raises PackingError if a part has none where the model has some, if a block is not one of 1 … num_blocks − 1, if a text does not
    begin with the initial state and go on from another, or if a block that is written is named by another part or twice by one.
    """
    if not num_blocks:
        return []
    states: list[StateBlocks] = []
    owners: dict[int, int] = {}
    for index, part in enumerate(parts):
        state = part.state
        if state is None:
            raise PackingError(f"part {index} has no state, the model has recurrent layers")
        if (part.start == 0) != (state.source == 0):
            raise PackingError(
                f"part {index} from position {part.start} goes on from the state in block {state.source}"
            )
        written = [state.running, *([state.snapshot] if state.snapshot else [])]
        if not all(0 < block < num_blocks for block in written) or not 0 <= state.source < num_blocks:
            raise PackingError(f"part {index} has a state outside 1 … {num_blocks - 1}: {state}")
        for block in written:
            if owners.setdefault(block, index) != index or written.count(block) > 1:
                raise PackingError(f"the state in block {block} is written twice")
        states.append(state)
    for index, state in enumerate(states):
        if owners.get(state.source, index) != index or state.source == state.snapshot != 0:
            raise PackingError(
                f"part {index} goes on from the state in block {state.source}, which the step overwrites"
            )
    return states


PassPart = tuple[int, SequencePart]
"""The index of a part in the step, and the part, or a piece of its tokens. Only the last piece samples."""


def passes(parts: Sequence[SequencePart], max_prompt_rows: int) -> Iterator[list[PassPart]]:
    """The forward passes of a step, in order, each with at most max_prompt_rows prompt rows.

    The same tokens are computed in the same order as in one pass, in smaller chunks. Parts without prompt rows are in the first
    pass.
    """
    pending = list(enumerate(parts))
    while pending:
        room = max_prompt_rows
        now: list[PassPart] = []
        later: list[PassPart] = []
        for index, part in pending:
            rows = part.prompt_rows
            if rows is None or len(rows.targets) <= room:
                now.append((index, part))
                room -= 0 if rows is None else len(rows.targets)
            elif room:
                piece, rest = _cut(part, rows, room)
                now.append((index, piece))
                later.append((index, rest))
                room = 0
            else:
                later.append((index, part))
        yield now
        pending = later


def _cut(part: SequencePart, rows: PromptRows, num_rows: int) -> tuple[SequencePart, SequencePart]:
    """Cut after the first `num_rows` prompt rows."""
    end = rows.first + num_rows
    state = part.state
    piece = part._replace(
        token_ids=part.token_ids[:end],
        sampling=None,
        prompt_rows=rows._replace(targets=rows.targets[:num_rows]),
        state=None if state is None else state._replace(snapshot=0),
    )
    rest = part._replace(
        token_ids=part.token_ids[end:],
        start=part.start + end,
        prompt_rows=rows._replace(first=0, targets=rows.targets[num_rows:]),
        state=None if state is None else state._replace(source=state.running),
    )
    return piece, rest


MAX_PROMPT_LOGITS = 1 << 24
"""Logits of prompt rows in memory at a time: 64 MiB in float32."""


class ModelRunner:
    """Implements StepRunner with a loaded model and its KV cache. Blocking; one step at a time."""

    def __init__(
        self,
        runtime: Runtime,
        kv_cache: KVCache,
        backend: AttentionBackend | None,
        sizes: StepSizes | None = None,
    ) -> None:
        """`backend`: see Runtime. `sizes`: initial sizes of the input buffers."""
        self.forward = runtime.bind(kv_cache, backend)
        plan = kv_cache.plan
        groups = [BlockGroup(group.num_blocks, group.window) for group in plan.groups]
        self._packer = Packer(plan.block_size, groups, runtime.device, sizes)
        self._num_state_blocks = 0 if plan.states is None else plan.states.num_blocks
        self._cross = None if plan.cross is None else BlockGroup(plan.cross.num_blocks)
        self._device = runtime.device
        vocab_size = runtime.config.get_text_config(decoder=True).vocab_size
        self._max_prompt_rows = max(1, MAX_PROMPT_LOGITS // vocab_size)
        self.kv_cache = kv_cache

    def execute(self, step: Step) -> list[PartResult]:
        """Run the step and sample; see StepRunner. Raises PackingError for a bad part, before any KV is written but that
        of copies.

        Computes logits of sampled rows and of prompt rows with requested log-probabilities, the latter in slices.
        """
        states_of(step.parts, self._num_state_blocks)  # refuses a bad part before the first pass
        outcomes = [_Outcome() for _ in step.parts]
        all_passes = list(passes(step.parts, self._max_prompt_rows))
        if len(all_passes) > 1 or self._cross is not None:
            self._pack(step.parts)  # refuses a bad part before the first pass
        with torch.inference_mode():
            self.kv_cache.copy_blocks(step.copies)
        self._encode(step.parts)
        for one_pass in all_passes:
            self._run_pass(one_pass, outcomes)
        return [outcome.result() for outcome in outcomes]

    def _pack(self, parts: Sequence[SequencePart]) -> Packing:
        """Pack the parts. Raises PackingError."""
        packing = self._packer.pack(parts)
        if self._cross is None:
            return packing
        return replace(packing, encoders=EncoderTables.of(parts, self._cross, packing.block_size))

    def _encode(self, parts: Sequence[SequencePart]) -> None:
        """Run the encoder for the parts that bring its input. The parts have been checked."""
        block_size = self.kv_cache.plan.block_size
        with torch.inference_mode():
            for encoder in (part.encoder for part in parts):
                if encoder is not None and encoder.token_ids:
                    slots = slots_of(encoder.table, 0, encoder.num_tokens, block_size)
                    self.forward.encode(encoder.token_ids, torch.from_numpy(slots).to(self._device))

    def _run_pass(self, parts: list[PassPart], outcomes: list[_Outcome]) -> None:
        """Run one forward pass and add its results to the outcomes of its parts."""
        packing = self._pack([part for _, part in parts])
        states = states_of([part for _, part in parts], self._num_state_blocks)
        ends = _Ends()
        prompts: list[tuple[int, int, PromptRows]] = []
        prompt_rows: list[int] = []
        for (index, part), offset in zip(parts, packing.offsets, strict=True):
            if part.sampling is not None:
                ends.add(index, part, part.sampling, offset + len(part.token_ids) - 1)
            if (requested := part.prompt_rows) is not None:
                prompts.append((index, part.start, requested))
                prompt_rows += range(offset + requested.first, offset + requested.first + len(requested.targets))
        with torch.inference_mode():
            logits, is_finite = self.forward.run(packing, ends.rows + prompt_rows, states)
            first = len(ends.rows)
            for index, start, requested in prompts:
                end = first + len(requested.targets)
                result = prompt_logprobs(
                    logits[first:end], requested.targets, requested.num_top, position=start + requested.first + 1
                )
                outcomes[index].add(result)
                first = end
            ends.choose(logits[: len(ends.rows)], outcomes)
            # Rows without logits count too: their KV would be shared.
            if not is_finite.all():
                bad_rows = (~is_finite).nonzero()[:, 0].tolist()
                for (index, part), offset in zip(parts, packing.offsets, strict=True):
                    outcomes[index].add_bad_rows(part, [row - offset for row in bad_rows])

    def logits(self, parts: Sequence[SequencePart]) -> torch.Tensor:
        """Run the parts and return the logits of every new token, [ΣT, vocab_size]."""
        packing = self._pack(parts)
        states = states_of(parts, self._num_state_blocks)
        self._encode(parts)
        with torch.inference_mode():
            return self.forward.run(packing, range(packing.num_tokens), states).logits

    def close(self) -> None:
        """Release the KV tensors and the model; the runner must not be used afterwards."""
        self.forward.close()


@dataclass(slots=True)
class _Outcome:
    """The result of a part so far. The first bad logits replace everything else."""

    tokens: list[SampledToken] = field(default_factory=list)
    """The part's own token, then those of its forks."""
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    candidates: BeamCandidates | None = None
    bad_logits: BadLogits | None = None

    def add(self, result: SampledToken | BeamCandidates | list[RowLogprobs] | BadLogits) -> None:
        """Add a token, what a beam may continue with, or log-probabilities of the prompt."""
        if isinstance(result, BadLogits):
            self.bad_logits = self.bad_logits or result
        elif isinstance(result, SampledToken):
            self.tokens.append(result)
        elif isinstance(result, BeamCandidates):
            self.candidates = result
        else:
            self.prompt_logprobs += result

    def add_bad_rows(self, part: SequencePart, rows: Sequence[int]) -> None:
        """Note packed rows that are not finite, relative to the part's first one; some may belong to other parts."""
        first = next((row for row in rows if 0 <= row < len(part.token_ids)), None)
        if first is not None and self.bad_logits is None:
            self.bad_logits = BadLogits(part.start + first + 1, math.nan)

    def result(self) -> PartResult:
        if self.bad_logits is not None:
            return PartResult(bad_logits=self.bad_logits)
        token = self.tokens[0] if self.tokens else None
        return PartResult(token, self.prompt_logprobs, forks=tuple(self.tokens[1:]), candidates=self.candidates)


class _Ends:
    """The last rows of parts, whose logits decide what follows: tokens are drawn, or candidates are found."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Packed rows, one for each part."""
        self._draws: list[tuple[int, int, Draw]] = []
        """(index of the part, index in `rows`, draw): several of one row if the part has forks."""

    def add(self, index: int, part: SequencePart, sampling: SamplingParams, row: int) -> None:
        """`row`: the packed row of the part's last token."""
        position, place = part.start + len(part.token_ids), len(self.rows)
        self.rows.append(row)
        for params in (sampling, *part.forks):
            draw = Draw(params, position, part.banned_ids, part.counts, part.forced_ids, part.num_candidates)
            self._draws.append((index, place, draw))

    def choose(self, logits: torch.Tensor, outcomes: list[_Outcome]) -> None:
        """Draw tokens and find candidates from the logits [rows, vocab_size] of the rows, and add them to the outcomes."""
        searches = [entry for entry in self._draws if entry[2].num_candidates]
        draws = [entry for entry in self._draws if not entry[2].num_candidates] if searches else self._draws
        for choose, entries in ((sample, draws), (candidates, searches)):
            if entries:
                results = choose(_rows(logits, [place for _, place, _ in entries]), [draw for *_, draw in entries])
                for (index, *_), result in zip(entries, results, strict=True):
                    outcomes[index].add(result)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The logits of the rows, in order; a copy unless these are all of them."""
    if rows == list(range(len(logits))):
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))
