"""The inverse of the status table."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvpool import client
from kvpool.client import Client, ClientConfig, KvpoolError
from kvpool.client.errors import from_rpc_error
from kvpool.v1 import cache_pb2
from tests.client.fakes import FakeManager, error_status, serving

CODES = [
    (code_pb2.RESOURCE_EXHAUSTED, client.ResourceExhausted),
    (code_pb2.INVALID_ARGUMENT, client.InvalidRequest),
    (code_pb2.NOT_FOUND, client.NotFound),
    (code_pb2.FAILED_PRECONDITION, client.FailedPrecondition),
    (code_pb2.ABORTED, client.Aborted),
    (code_pb2.ALREADY_EXISTS, client.AlreadyExists),
    (code_pb2.UNIMPLEMENTED, client.Unimplemented),
    (code_pb2.PERMISSION_DENIED, client.PermissionDenied),
    (code_pb2.INTERNAL, client.ServiceError),
]


@pytest.mark.parametrize(("code", "exception"), CODES)
async def test_every_status_becomes_its_exception(code: int, exception: type[KvpoolError]) -> None:
    """A reason of another domain, e.g. a proxy's, is not the manager's."""
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=250_000_000))
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="tokens", description="empty")
    quota = error_details_pb2.QuotaFailure()
    quota.violations.add(subject="worker-0", description="4,096 live sequences")
    details = (retry, bad, quota)
    manager = FakeManager()
    manager.route_errors.append(error_status(code, "WHY", "needed 5, there are 3", *details, position="12"))
    manager.route_errors.append(error_status(code, "WHY", "needed 5, there are 3", *details, domain="example.com"))
    async with serving(manager), Client(config=ClientConfig(manager=manager.address)) as connected:
        for reason, metadata in (("WHY", {"position": "12"}), ("", {})):
            with pytest.raises(KvpoolError, match="needed 5, there are 3") as caught:
                await connected.route([1, 2])
            error = caught.value
            assert type(error) is exception
            assert (error.reason, error.retry_after, error.metadata) == (reason, 0.25, metadata)
            assert error.violations == ("tokens: empty", "worker-0: 4,096 live sequences")


async def test_a_call_that_the_transport_has_dropped_is_made_again() -> None:
    """CANCELLED without a reason is no word of a service, and not our own doing: nobody was there, as with UNAVAILABLE."""
    manager = FakeManager()
    manager.route_errors.append(status_pb2.Status(code=code_pb2.CANCELLED))
    async with serving(manager), Client(config=ClientConfig(manager=manager.address)) as connected:
        await connected.route([1, 2])
    assert len(manager.routes) == 2


@pytest.mark.parametrize(
    "details", [None, error_status(code_pb2.ABORTED, "GAP", "other message").SerializeToString(), b"no status"]
)
def test_a_status_without_good_details_still_becomes_its_exception(details: bytes | None) -> None:
    """The transport's own errors carry none; details that contradict their status are not believed."""
    metadata = grpc.aio.Metadata(*([] if details is None else [("grpc-status-details-bin", details)]))
    rpc_error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), metadata, details="connection refused"
    )
    error = from_rpc_error(rpc_error, "worker-0")
    assert type(error) is client.Unavailable
    assert (str(error), error.reason, error.retry_after) == (
        "worker-0: not there, or gone (connection refused)",
        "",
        None,
    )


async def test_a_prompt_larger_than_a_message_is_refused_here() -> None:
    async with Client(config=ClientConfig(manager="127.0.0.1:1")) as connected:
        with pytest.raises(client.InvalidRequest, match="a message holds"):
            await connected.route([1] * (5 * 1024 * 1024))


async def test_check_and_describe_return_what_the_manager_says() -> None:
    manager = FakeManager()
    manager.violations = [cache_pb2.Violation(law="conservation", message="one block too many", block_id=3)]
    async with serving(manager), Client(config=ClientConfig(manager=manager.address)) as connected:
        assert (await connected.check()).violations == manager.violations
        assert (await connected.describe()).epoch == 7
        await connected.describe(worker_id="w", first_block=3, max_blocks=5, max_sequences=8)
    asked = cache_pb2.DescribeRequest(worker_id="w", include_blocks=True, first_block=3, max_blocks=5, max_sequences=8)
    assert manager.describes == [cache_pb2.DescribeRequest(), asked]


def test_the_documents_that_the_source_names_are_there() -> None:
    package = Path(client.__file__).resolve().parent
    root = package.parent
    named = {
        (source.name, document)
        for source in package.rglob("*.py")
        for document in re.findall(r"[\w./-]+\.(?:md|proto)\b", source.read_text())
    }
    assert [(source, document) for source, document in sorted(named) if not (root / document).is_file()] == []
    assert ("errors.py", "protos/kvpool/v1/cache.proto") in named
