"""What a worker says of batch invariance is what its model does, on this CPU and on others."""

from __future__ import annotations

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
from kvpool.worker_service.model.settings import RuntimeName
from kvpool.worker_service.server import log_batch_invariance
from kvpool.worker_service.step import SequencePart
from tests.attention.fake_blas import FakeBlas, fixed, in_halves, odd_rows
from tests.cluster.in_process import in_process_cluster
from tests.model.paged import NEEDS_PACKING, NEVER, PagedModel, load, quiet
from tests.tiny_models import make_tiny_model

NUM_TOKENS = 140
"""More than a partition of keys."""


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
    paged = PagedModel(loaded, 256, NEVER)
    text = [(7 * index) % 50 + 3 for index in range(NUM_TOKENS)]
    table = paged.request(text, 0).table
    chunks = [SequencePart(text[first : first + chunk], first, (table,), None) for first in range(0, NUM_TOKENS, chunk)]
    return torch.cat([paged.runner.logits([part]) for part in chunks])


@NEEDS_PACKING
def test_a_model_keeps_its_bits_on_a_cpu_that_cuts_elsewhere(loaded: LoadedModel) -> None:
    """The whole model over the products of another CPU."""
    with FakeBlas(in_halves(128)) as blas:
        said = found(loaded)
        assert said.attention_partition == 128
        assert blas.num_products
        at_once = rows(loaded, NUM_TOKENS)
        assert torch.equal(rows(loaded, 70), at_once)
        assert torch.equal(rows(loaded, 33), at_once)
    assert said.promised
    assert "partitions of 128 keys" in said.reason


@NEEDS_PACKING
def test_a_model_keeps_its_bits_where_no_partition_holds(loaded: LoadedModel) -> None:
    with FakeBlas(fixed(64), odd_rows):
        said = found(loaded)
        assert torch.equal(rows(loaded, 33), rows(loaded, NUM_TOKENS))
    assert said.promised
    assert "a fixed order" in said.reason


def test_without_packed_products_nothing_is_promised(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariance, "packing_works", lambda _: False)
    said = found(loaded)
    assert not said.promised
    assert "oneDNN" in said.reason
    assert "may get another text" in said.reason


@NEEDS_PACKING
def test_a_linear_layer_whose_rows_depend_on_their_place_is_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = packed_linear._apply

    def varying(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result = apply(inputs, weight, bias)
        result[..., 1::2, :] *= 1 + 2**-20
        return result

    monkeypatch.setattr(packed_linear, "_apply", varying)
    said = found(loaded)
    assert not said.promised
    assert "model.layers.0.self_attn.q_proj" in said.reason


@NEEDS_PACKING
def test_what_only_the_whole_model_shows_is_seen_too(loaded: LoadedModel) -> None:
    """An operation that no replacement is known for, here of the last norm."""
    norm = modules_of(loaded.runtime).model.norm
    forward = norm.forward

    def varying(hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(hidden).clone()
        result[:, -1] *= 1 + 2**-20
        return result

    norm.forward = varying
    said = found(loaded)
    assert not said.promised
    assert "rows of logits" in said.reason


def of_bfloat16(folder: Path, runtime: RuntimeName) -> worker_pb2.BatchInvariance:
    path = make_tiny_model("qwen3", folder).path
    return found(load(path, dtype="bfloat16", runtime=runtime))


@pytest.mark.native
def test_natively_it_is_promised_in_bfloat16_too(tmp_path: Path) -> None:
    said = of_bfloat16(tmp_path, "native")
    assert said.promised
    assert said.attention_partition == 256


def test_with_torch_nothing_is_promised_in_bfloat16(tmp_path: Path) -> None:
    said = of_bfloat16(tmp_path, "torch")
    assert not said.promised
    assert said.attention_partition == 0
    assert "bfloat16" in said.reason


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


def test_nothing_is_promised_where_layers_are_recurrent(tmp_path: Path) -> None:
    """Also for short convolutions, in which a short text shows no difference."""
    loaded = load(make_tiny_model("lfm2", tmp_path).path)
    found = loaded.try_batch_invariance(loaded.attention_backend("torch", 4, lambda _: None)).facts.batch_invariance
    assert not found.promised
    assert "recurrent layers sum in an order that depends on how a text is cut" in found.reason
