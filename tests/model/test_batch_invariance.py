"""In float32 on a CPU the logits of a token are the same bits whatever else runs, and however its sequence was cut into steps; it
is tested at load."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.worker_service.attention.invariance import first_difference
from kvpool.worker_service.model.forward import packed_linear
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.guard import batch_invariance
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.server import log_batch_invariance
from tests.attention.fake_blas import FakeBlas, fixed, in_halves, odd_rows
from tests.cluster.in_process import in_process_cluster
from tests.model.paged import BLOCK_SIZE, NEEDS_PACKING, NEVER, PagedModel, Request, load, quiet
from tests.model.ring_cache import RingCache
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

pytestmark = NEEDS_PACKING

ARCHITECTURES = ("gpt2", "mixtral", "gemma2", "gpt_oss", "deepseek_v3")
"""Of each norm and product that models compute, and each kind of attention, one at least; test_invariant.py has the activations."""

NUM_BLOCKS = 1024
SHARED = 268
"""Tokens that the first and the last text have in common: more than one segment of the keys whatever their length, and no whole
number of segments."""
LENGTHS = (276, 33, 5, 131, 275)


def texts() -> list[list[int]]:
    numbers = random.Random(5)
    made = [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    made[-1][:SHARED] = made[0][:SHARED]
    return made


TEXTS = texts()


def compute(paged: PagedModel, runs: Sequence[Request], chunks: Iterator[int]) -> list[torch.Tensor]:
    """The logits [T, vocab_size] of what is left of each text, the texts in chunks of the next length each, all that are not at
    their end together in a step, the order of which changes from step to step."""
    logits: list[list[torch.Tensor]] = [[] for _ in runs]
    numbers = random.Random(1)
    for run in runs:
        run.computed = max(run.computed, run.start)
    while waiting := [index for index, run in enumerate(runs) if run.computed < len(run.prompt)]:
        numbers.shuffle(waiting)
        parts = [paged.next_part(runs[index], next(chunks)) for index in waiting]
        lengths = [len(part.token_ids) for part in parts]
        for index, rows in zip(waiting, torch.split(paged.runner.logits(parts), lengths), strict=True):
            logits[index].append(rows)
            runs[index].computed += len(rows)
    return [torch.cat(rows) for rows in logits]


def one_segment(paged: PagedModel) -> int:
    """Tokens of a segment of keys, which depend on the CPU."""
    assert paged.partition is not None
    return paged.partition


def alone(paged: PagedModel, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The logits of each text by itself, at once."""
    return [logits for text in texts for logits in compute(paged, [paged.request(text, 0)], repeat(NEVER))]


@dataclass
class Subject:
    loaded: LoadedModel
    alone: list[torch.Tensor]
    """Logits of each text by itself, at once."""

    def paged(self, min_shared_tokens: int = NEVER) -> PagedModel:
        return PagedModel(self.loaded, NUM_BLOCKS, min_shared_tokens)


def require_promise(loaded: LoadedModel) -> None:
    """The trial at load, of a short text, finds no difference either: a worker that finds one promises nothing."""
    backend = loaded.attention_backend("auto", BLOCK_SIZE, quiet)
    said = loaded.try_batch_invariance(backend).facts.batch_invariance
    assert said.promised, said.reason


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    loaded = load(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param)).path)
    require_promise(loaded)
    return Subject(loaded, alone(PagedModel(loaded, NUM_BLOCKS), TEXTS))


def assert_same_bits(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    different = (ours != expected).any(dim=-1).nonzero().flatten().tolist()
    largest = float((ours - expected).abs().max())
    assert not different, (
        f"{len(different)} of {len(expected)} rows differ, by {largest:.2g} at most: {different[:8]} …"
    )


def test_neighbours_order_offset_and_chunks_change_no_bit(subject: Subject) -> None:
    paged = subject.paged()
    together = compute(paged, [paged.request(text, 0) for text in TEXTS], cycle([1, 40, 3, 16, 17, 100, 2]))
    for ours, expected in zip(together, subject.alone, strict=True):
        assert_same_bits(ours, expected)


def test_a_row_decoded_alone_has_the_bits_of_prefill(subject: Subject) -> None:
    paged = subject.paged()
    border = one_segment(paged)
    run = paged.request(TEXTS[0][: border + 2], 0)
    (ours,) = compute(paged, [run], chain([border - 2], repeat(1)))
    assert_same_bits(ours, subject.alone[0][: border + 2])


@pytest.mark.parametrize(("min_shared_tokens", "chunk"), [(NEVER, NEVER), (1, 1)], ids=["gathered", "attended_once"])
def test_a_cached_prefix_changes_no_bit(subject: Subject, min_shared_tokens: int, chunk: int) -> None:
    """Whether it is computed or found, read for each sharer or once for all of them, which then decode."""
    paged = subject.paged(min_shared_tokens)
    first = paged.request(TEXTS[0], 0)
    compute(paged, [first], repeat(50))
    shared = first.table[: SHARED // BLOCK_SIZE]
    sharers = [paged.request(TEXTS[-1], 0, shared), paged.request(TEXTS[0], 0, shared), paged.request(TEXTS[2], 0)]
    expected = (subject.alone[-1][SHARED:], subject.alone[0][SHARED:], subject.alone[2])
    for ours, truth in zip(compute(paged, sharers, repeat(chunk)), expected, strict=True):
        assert_same_bits(ours, truth)


def test_two_threads_change_no_bit(subject: Subject) -> None:
    """They share out the numbers of a tensor without regard to rows, and the rows of a product in other ways than one does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        by_itself = alone(subject.paged(), TEXTS)
        paged = subject.paged()
        together = compute(paged, [paged.request(text, 0) for text in TEXTS], repeat(NEVER))
    finally:
        torch.set_num_threads(threads)
    for ours, expected in zip(together, by_itself, strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.slow
def test_smollm2_has_the_same_bits_alone_packed_in_chunks_and_behind_a_shared_prefix() -> None:
    """Sizes at which sums and products go other ways than in tiny models. Converts it at the first run."""
    loaded = load("smollm2", cache_dir=None)
    require_promise(loaded)
    numbers = random.Random(2)
    shared_tokens = one_segment(PagedModel(loaded, NUM_BLOCKS)) + 8
    long, short = ([numbers.randrange(loaded.facts.vocab_size) for _ in range(n)] for n in (shared_tokens + 12, 5))
    by_itself = alone(PagedModel(loaded, NUM_BLOCKS), [long, short])
    paged = PagedModel(loaded, NUM_BLOCKS, min_shared_tokens=1)
    runs = [paged.request(long, 0), paged.request(short, 0)]
    first = compute(paged, runs, cycle([64, 100]))  # gathered
    shared = runs[0].table[: shared_tokens // BLOCK_SIZE]
    sharers = [paged.request(long, 0, shared) for _ in range(2)]
    found = compute(paged, sharers, cycle([1, 7, 3]))  # attended once, in other chunks each
    expected = [*by_itself, by_itself[0][shared_tokens:], by_itself[0][shared_tokens:]]
    for ours, truth in zip([*first, *found], expected, strict=True):
        assert_same_bits(ours, truth)


NUM_TOKENS = 140
"""More than a partition of keys."""
TEXT = [(7 * index) % 50 + 3 for index in range(NUM_TOKENS)]


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load(make_tiny_model("qwen3", tmp_path).path)


@pytest.fixture(autouse=True)
def trials_of_its_own() -> Any:
    first_difference.cache_clear()
    yield
    first_difference.cache_clear()


def found(loaded: LoadedModel) -> worker_pb2.BatchInvariance:
    backend = loaded.attention_backend("auto", 16, quiet)
    return loaded.try_batch_invariance(backend).facts.batch_invariance


def rows(loaded: LoadedModel, chunk: int) -> torch.Tensor:
    """The logits of a text in chunks, with the backend that a worker takes."""
    return RingCache(loaded, by_window=False).logits(TEXT, range(chunk, NUM_TOKENS, chunk))


@NEEDS_PACKING
@pytest.mark.parametrize(
    ("blas", "partition", "reason"),
    [(FakeBlas(in_halves(128)), 128, "partitions of 128 keys"), (FakeBlas(fixed(64), odd_rows), 256, "a fixed order")],
    ids=["cuts elsewhere", "no partition holds"],
)
def test_a_model_keeps_its_bits_on_another_cpu(
    blas: FakeBlas, partition: int, reason: str, loaded: LoadedModel
) -> None:
    with blas:
        said = found(loaded)
        at_once = rows(loaded, NUM_TOKENS)
        assert torch.equal(rows(loaded, 70), at_once)
        assert torch.equal(rows(loaded, 33), at_once)
    assert blas.num_products
    assert (said.promised, said.attention_partition) == (True, partition)
    assert reason in said.reason


def without_packed_products(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "packing_works", lambda _: False)


def with_varying_products(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = packed_linear._apply

    def varying(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = apply(inputs, weight, bias)
        result[..., 1::2, :] *= 1 + 2**-20
        return result

    monkeypatch.setattr(packed_linear, "_apply", varying)


def with_a_varying_norm(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an operation that no replacement is known for: only the whole model shows it."""
    norm = modules_of(loaded.runtime).model.norm
    forward = norm.forward

    def varying(hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(hidden).clone()
        result[:, -1] *= 1 + 2**-20
        return result

    monkeypatch.setattr(norm, "forward", varying)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_packed_products, "oneDNN .* may get another text"),
        pytest.param(with_varying_products, r"model\.layers\.0\.self_attn\.q_proj", marks=NEEDS_PACKING),
        pytest.param(with_a_varying_norm, "rows of logits", marks=NEEDS_PACKING),
    ],
)
def test_where_rows_depend_on_others_nothing_is_promised(
    change: Callable[[LoadedModel, pytest.MonkeyPatch], None],
    reason: str,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(loaded, monkeypatch)
    said = found(loaded)
    assert not said.promised
    assert re.search(reason, said.reason)


@pytest.mark.parametrize(
    ("architecture", "dtype", "runtime", "partition", "reason"),
    [
        pytest.param("qwen3", "bfloat16", "native", 256, None, marks=pytest.mark.native),
        ("qwen3", "bfloat16", "torch", 0, "bfloat16"),
        # Also for short convolutions, in which a short text shows no difference.
        ("lfm2", "float32", "torch", None, "recurrent layers sum in an order that depends on how a text is cut"),
    ],
)
def test_some_models_have_no_promise(
    architecture: str, dtype: str, runtime: str, partition: int | None, reason: str | None, tmp_path: Path
) -> None:
    """Natively it is given in bfloat16 too."""
    said = found(load(make_tiny_model(architecture, tmp_path).path, dtype=dtype, runtime=runtime))
    assert said.promised == (reason is None)
    assert partition in (said.attention_partition, None)
    assert (reason or "") in said.reason


def test_the_model_can_be_served_after_it_was_tried(loaded: LoadedModel) -> None:
    """Nothing of the trial stays bound to it."""
    before = rows(loaded, NUM_TOKENS)
    found(loaded)
    assert torch.equal(rows(loaded, NUM_TOKENS), before)


async def test_the_log_says_it_and_a_client_learns_it_from_get_model(tmp_path: Path) -> None:
    """In float32 on a CPU the absence of the promise is a warning."""
    tiny = make_tiny_model("qwen3", tmp_path / "qwen3")
    async with (
        in_process_cluster(tiny.path, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.worker.address) as channel,
    ):
        asked = worker_pb2.GetModelRequest(facts_only=True)
        (message,) = [message async for message in worker_pb2_grpc.WorkerServiceStub(channel).GetModel(asked)]
        facts = cluster.worker.facts
    assert message.facts == facts
    assert facts.batch_invariance.attention_partition > 0
    for promised, level in ((True, "info"), (False, "warning")):
        with capture_logs() as logs:
            facts.batch_invariance.CopyFrom(worker_pb2.BatchInvariance(promised=promised, reason="as it was found"))
            log_batch_invariance(facts)
        (entry,) = logs
        assert entry["log_level"] == level
        assert "as it was found" in entry["event"]
