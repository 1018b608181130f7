"""What a worker says of batch invariance is what its model does, on this CPU and on others."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from tests.model.paged import NEEDS_PACKING, load, quiet
from tests.model.ring_cache import RingCache
from tests.tiny_models import make_tiny_model

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
