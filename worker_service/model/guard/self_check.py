"""The last check before a model is served: paged attention must compute the same as eager attention."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import structlog
import torch

from ...attention.interface import ATTENTION_NAME
from ...attention.layer import AttentionBackend
from ...attention.layout import BlockGroup
from ...attention.packing import pack
from ...attention.torch_backend import TorchAttention
from ...step import EncoderBlocks, SequencePart, StateBlocks
from ..errors import ModelError, UnsupportedModel
from ..forward.contract import Runtime
from ..forward.kv_cache import KVCache
from ..forward.kv_plan import CrossPlan, KVCachePlan, StatesPlan
from ..forward.modules import ModulesRuntime
from ..forward.runner import ModelRunner
from ..language_model import is_composite

_log = structlog.get_logger("kvpool.model")


@contextmanager
def probing(model: Any) -> Iterator[None]:
    """Check a model inside. Raises UnsupportedModel if it fails to run, but not if it lacks memory."""
    started = time.monotonic()
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise all kinds of errors for input that they do not support
        raise UnsupportedModel(
            f"{type(model).__name__} fails to run on one packed row of tokens: {type(error).__name__}: {error}"
        ) from error
    _log.debug("probed", model=type(model).__name__, seconds=round(time.monotonic() - started, 3))


_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest relative difference of the logits (root mean square, of what varies between tokens)."""
_TOLERANCE_OF_STATES = 1e-4
"""The same of a replica with recurrent layers, for tokens that go on from a state. Rounding makes less than 1e-5. Some types clamp
the time step in chunks only, which is off by about 1e-3: a text would depend on where it is cut."""
_SINGLE_TOKENS = 3
"""Tokens of each sequence that are computed one by one, after a kept state or from its beginning."""
_BLOCK_SIZE = 4
_NUM_STATE_BLOCKS = 5
"""The null block, and those that _logits_from_snapshots names."""
LENGTHS = (24, 14, 9, 5)
"""Lengths of the texts; the last is below every threshold of a replica."""
FEW_TOKENS = (12, 9, 5)
"""Lengths for a large model, whose forward passes are slow; its replica was checked with all."""
# Steps of (sequence, first token, end): in chunks and at once, packed in changing orders, after others in the row, prefill
# mixed with decode, and alone.
STEPS = (
    ((1, 0, 5), (0, 0, 9)),
    ((2, 0, 9), (0, 9, 16), (1, 5, 13), (3, 0, 3)),
    ((1, 13, 14), (0, 16, 23), (3, 3, 5)),
    ((0, 23, 24),),
)
_FAR = 2
"""The sequence that runs at the last positions of the longest text, with another one in the row."""
_NEAR, _BRIEF = 0, 3
"""The other ones, at the first positions: the longest text, and one below every threshold of a replica, so that a rule that depends
on the longest position of the row shows at any length."""


def probe(runtime: ModulesRuntime, max_model_len: int, is_thorough: bool = True) -> None:
    """Compare random sequences, packed and in chunks over scattered blocks, with each alone in eager attention.

    Then one of them again with a neighbour at the last positions below max_model_len, and with recurrent layers from states that
    were kept. Raises UnsupportedModel if anything differs by more than rounding. The model is unbound afterwards. is_thorough: try
    more tokens and steps.
    """
    model, device = runtime.model, runtime.device
    lengths = [min(length, max_model_len) for length in (LENGTHS if is_thorough else FEW_TOKENS)]
    sequences = random_sequences(model.config, lengths)
    alone = [eager_logits(model, tokens, device) for tokens in sequences]
    with _runner(runtime) as (runner, tables):
        paged = logits_of_texts(runner, sequences, tables, STEPS)
    for ours, reference in zip(paged, alone, strict=True):
        why = "ignores position_ids, has a mask of its own, or keeps a state"
        require_equal(runtime, ours, reference, "packed and in chunks", why)
    if is_thorough and is_composite(model.config):
        # Its own generate may count in another way, for the sake of images.
        own = eager_logits(model, sequences[0], device, start=None)
        require_equal(runtime, alone[0], own, "with plain positions", "has others for texts too")
    if runtime.mixers:
        why = "computes a single token otherwise than several, as its own decoding after a prefill does, or uses another state"
        tolerance = _TOLERANCE_OF_STATES if is_thorough else None
        for index, ours, where in _logits_from_snapshots(runtime, sequences):
            require_equal(runtime, ours, alone[index][-len(ours) :], where, why, tolerance)
    far_start = max_model_len - lengths[_FAR]
    far = eager_logits(model, sequences[_FAR], device, far_start)
    rows = ((_NEAR, True), (_NEAR, False), (_BRIEF, True)) if is_thorough else ((_NEAR, True),)
    for near, far_first in rows:
        near_logits, far_logits = _near_and_far_logits(runtime, sequences, near, far_start, far_first)
        where = f"with a neighbour at position {max_model_len - 1}"
        why = "derives RoPE frequencies from the longest text of the row: give a smaller --max-model-len"
        require_equal(runtime, near_logits, alone[near], where, why)
        where = f"at positions {far_start} … {max_model_len - 1}"
        require_equal(runtime, far_logits, far, where, "does not take positions from position_ids")


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference over that of the reference less its mean per token, both [T, vocab_size]."""
    ours, reference = ours.double(), reference.double()
    varies = reference - reference.mean(dim=-1, keepdim=True)
    return float((ours - reference).norm() / varies.norm())


def random_sequences(
    config: Any, lengths: Sequence[int], seed: int = 0, vocab_size: int | None = None
) -> list[list[int]]:
    """Token ids without a special meaning in the config, such as padding or an image. vocab_size: None: the decoder's."""
    special: set[int] = set()
    parts = [getattr(config, name, None) for name in config.sub_configs]
    for part in (config, config.get_text_config(decoder=True), *(part for part in parts if hasattr(part, "to_dict"))):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value])
    numbers = random.Random(seed)
    ids = range(vocab_size or config.get_text_config(decoder=True).vocab_size)
    plain = [token for token in ids if token not in special] if len(ids) < 1000 else ids
    drawn = (token for token in iter(lambda: numbers.choice(plain), None) if token not in special)
    return [list(islice(drawn, length)) for length in lengths]


def require_equal(
    runtime: ModulesRuntime,
    ours: torch.Tensor,
    reference: torch.Tensor,
    where: str,
    why: str,
    tolerance: float | None = None,
) -> None:
    """Raises UnsupportedModel if logits [T, vocab_size] differ by more than rounding. tolerance: None: that of the dtype."""
    difference, tolerance = relative_difference(ours, reference), tolerance or _TOLERANCE[runtime.dtype]
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"{type(runtime.model).__name__} computes other logits over paged KV, {where}, than alone in eager attention: "
            f"they differ by {difference:.2%}, rounding in {runtime.dtype} explains {tolerance:.2%}. It probably {why}."
        )


def scattered_tables(count: int, num_tokens: int, block_size: int) -> list[list[int]]:
    """A block table for each of `count` texts of at most num_tokens tokens; none has neighbouring blocks, the first one is in
    descending order."""
    end = 1 + count * -(-num_tokens // block_size)
    tables = [list(range(1 + index, end, count)) for index in range(count)]
    return [tables[0][::-1], *tables[1:]]


@contextmanager
def paged_runner(
    runtime: Runtime,
    backend: AttentionBackend | None,
    num_texts: int,
    num_tokens: int,
    block_size: int,
    encoders: Sequence[EncoderBlocks] = (),
) -> Iterator[tuple[ModelRunner, list[list[int]]]]:
    """A runner over a cache filled with NaN, and a table of scattered blocks for each of the texts, of at most num_tokens tokens.
    Afterwards the model is unbound. encoders: those whose blocks the cross group has."""
    tables = scattered_tables(num_texts, num_tokens, block_size)
    cross = None
    if encoders:
        num_cross = 1 + max(max(encoder.table) for encoder in encoders)
        cross = CrossPlan(num_cross, 0, num_cross * block_size)
    num_blocks = 1 + max(map(max, tables))
    states = StatesPlan(max(_NUM_STATE_BLOCKS, 1 + num_texts), 0) if runtime.mixers else None
    plan = KVCachePlan.one_group(num_blocks, block_size, 0, states, cross, attends=bool(runtime.layers))
    cache = KVCache(plan, runtime.layers, runtime.dtype, runtime.device, runtime.mixers)
    cache.fill(float("nan"))
    runner = ModelRunner(runtime, cache, backend)
    try:
        yield runner, tables
    finally:
        runner.close()


def _runner(runtime: ModulesRuntime) -> AbstractContextManager[tuple[ModelRunner, list[list[int]]]]:
    return paged_runner(runtime, TorchAttention(runtime.dtype), len(LENGTHS), max(LENGTHS), _BLOCK_SIZE)


def _logits_from_snapshots(
    runtime: ModulesRuntime, sequences: list[list[int]]
) -> Iterator[tuple[int, torch.Tensor, str]]:
    """Logits of the ends of two sequences: (sequence, [T, vocab_size], how they were computed).

    The state of the first is kept on the way; two others go on from it, several tokens at once and a single one, while the second
    sequence runs, and begins anew in the same blocks.
    """
    first, second = sequences[0], sequences[1]
    kept_at, cut = len(first) // 2, len(second) // 2
    if not 0 < kept_at < len(first) - 1 or not cut:
        return  # texts of so few tokens have no state worth keeping
    snapshot, running, other, own = 1, 2, 3, 4

    with _runner(runtime) as (runner, tables):

        def run(*parts: tuple[int, int, int, StateBlocks]) -> list[torch.Tensor]:
            """The logits of each of the parts (sequence, first token, end, state)."""
            chunks = [
                SequencePart(sequences[index][start:end], start, tables_of(index), None, state=state)
                for index, start, end, state in parts
            ]
            return list(torch.split(runner.logits(chunks), [len(chunk.token_ids) for chunk in chunks]))

        def tables_of(index: int) -> tuple[list[int], ...]:
            return (tables[index],) if runtime.layers else ()

        def of_snapshot() -> list[torch.Tensor]:
            states = runner.kv_cache.states
            return [tensor[snapshot].clone() for tensor in states or ()]

        run((1, 0, cut, StateBlocks(0, own)), (0, 0, kept_at, StateBlocks(0, running, snapshot)))
        saved = of_snapshot()
        end = len(first)
        _, at_once = run((1, cut, len(second), StateBlocks(own, own)), (0, kept_at, end, StateBlocks(snapshot, other)))
        yield 0, at_once, "from a state that was kept"
        # Single tokens of both in one call, then what is left at once.
        num_single = min(_SINGLE_TOKENS, end - kept_at - 1, len(second) - 1)
        ours: list[list[torch.Tensor]] = [[], []]
        for place in range(num_single + 1):
            last = place == num_single
            places = (kept_at + place, place)
            ends = (end, len(second)) if last else (places[0] + 1, places[1] + 1)
            states = (StateBlocks(running if place else snapshot, running), StateBlocks(own if place else 0, own))
            rows = run((0, places[0], ends[0], states[0]), (1, places[1], ends[1], states[1]))
            for collected, new in zip(ours, rows, strict=True):
                collected.append(new)
        yield 0, torch.cat(ours[0]), "from a state that was kept, token by token"
        yield 1, torch.cat(ours[1]), "again from the beginning"
        if not all(torch.equal(then, now) for then, now in zip(saved, of_snapshot(), strict=True)):
            raise UnsupportedModel(f"{type(runtime.model).__name__} changes a state that others go on from.")


def logits_of_texts(
    runner: ModelRunner,
    texts: Sequence[list[int]],
    tables: Sequence[list[int]],
    steps: Sequence[Sequence[tuple[int, int, int]]],
    encoders: Sequence[EncoderBlocks] = (),
) -> list[torch.Tensor]:
    """The logits [T, vocab_size] of each text, computed in steps of (text, first token, end), less the tokens that the texts do not
    have. The state of a text is in the block after its index. encoders: of each text, if the model has an encoder, which runs with
    its first tokens."""
    plan, found = runner.kv_cache.plan, [list[torch.Tensor]() for _ in texts]

    def state(index: int, first: int) -> StateBlocks | None:
        return StateBlocks(1 + index if first else 0, 1 + index) if plan.states else None

    def encoder(index: int, first: int) -> EncoderBlocks | None:
        if not encoders:
            return None
        return encoders[index]._replace(token_ids=()) if first else encoders[index]

    for step in steps:
        chunks = [(index, first, texts[index][first:end]) for index, first, end in step if index < len(texts)]
        chunks = [chunk for chunk in chunks if chunk[2]]
        if chunks:
            parts = [
                SequencePart(
                    tokens,
                    first,
                    (tables[index],) * len(plan.groups),
                    None,
                    state=state(index, first),
                    encoder=encoder(index, first),
                )
                for index, first, tokens in chunks
            ]
            rows = torch.split(runner.logits(parts), [len(tokens) for _, _, tokens in chunks])
            for (index, *_), own in zip(chunks, rows, strict=True):
                found[index].append(own)
    return [torch.cat(parts) for parts in found]


def _near_and_far_logits(
    runtime: ModulesRuntime, sequences: list[list[int]], near: int, far_start: int, far_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of `near` and _FAR in one row; the positions of _FAR start at far_start, without KV before them."""
    order = (_FAR, near) if far_first else (near, _FAR)
    with _runner(runtime) as (runner, tables):
        plan = runner.kv_cache.plan
        groups = [BlockGroup(group.num_blocks, group.window) for group in plan.groups]
        parts = [SequencePart(sequences[index], 0, (tables[index],) * len(groups), None) for index in order]
        packing = pack(parts, _BLOCK_SIZE, groups, runtime.device)
        shifts = [torch.full((len(sequences[index]),), far_start if index == _FAR else 0) for index in order]
        packing = replace(packing, position_ids=packing.position_ids + torch.cat(shifts).to(runtime.device))
        states = [StateBlocks(0, 1), StateBlocks(0, 2)] if runtime.mixers else []
        with torch.inference_mode():
            logits = runner.forward.run(packing, range(packing.num_tokens), states).logits
    first, second = torch.split(logits, [len(sequences[index]) for index in order])
    return (second, first) if far_first else (first, second)


def eager_logits(model: Any, tokens: list[int], device: torch.device, start: int | None = 0) -> torch.Tensor:
    """The logits [T, vocab_size] of one sequence in eager attention. Positions are passed, as `generate` does, to models with that
    parameter. start: the first position; None: none are passed."""
    positions: dict[str, torch.Tensor] = {}
    if start or (start == 0 and "position_ids" in inspect.signature(model.forward).parameters):
        positions["position_ids"] = torch.arange(start, start + len(tokens), device=device)[None]
    with eager(model):
        ids = torch.tensor([tokens], device=device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **positions).logits[0]
    return logits


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """Let a model attend in transformers' own way inside."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
