"""A life of the manager whose Register is called without a network."""

from __future__ import annotations

from pathlib import Path

from google.rpc import error_details_pb2, status_pb2

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.servicer import CacheServicer
from kvpool.v1 import cache_pb2 as pb
from tests.cache_service.edge.peer import registration
from tests.rich_status import detail
from tests.simulation.rpc import Context

LEASE = 6.0


class Life:
    """One life of the manager over a state directory, without a network; its clock is ours."""

    def __init__(self, directory: Path, *, session_start: int = 12345) -> None:
        self.now = 0.0
        self.epochs = FileEpochs.open(directory)
        self.manager = CacheManager(self.epochs.epoch, session_start=session_start, lease_seconds=LEASE)
        self.servicer = CacheServicer(self.manager, self.epochs, keep_alive_seconds=1.0, clock=lambda: self.now)

    async def register(self, worker_id: str, *, seen: int = 0, last: int = 0, no: int = 1) -> pb.RegisterResponse | str:
        """The answer, or the reason of the refusal."""
        request = registration(worker_id, register_no=no, highest_epoch_seen=seen, last_session=last, holds_state=True)
        context = Context()
        response = await self.servicer.Register(request, context)  # type: ignore[arg-type]
        if context.failure is None:
            assert isinstance(response, pb.RegisterResponse)
            return response
        assert context.failure.trailing is not None
        status = status_pb2.Status.FromString(context.failure.trailing)
        info = detail(status, error_details_pb2.ErrorInfo)
        if info.reason == "FOREIGN_EPOCH":
            assert info.metadata["epoch"] == str(self.manager.epoch)
            assert "drop all blocks" in status.message
        return str(info.reason)

    async def epoch_after(self, worker_id: str, seen: int) -> int | str:
        answer = await self.register(worker_id, seen=seen)
        return answer if isinstance(answer, str) else answer.epoch

    async def former_lease_ms(self) -> int:
        """How long a worker of the life before may still come back."""
        answer: pb.DescribeResponse = await self.servicer.Describe(pb.DescribeRequest(), Context())  # type: ignore[arg-type]
        return answer.former_lease_remaining_ms

    @property
    def on_disk(self) -> int:
        """The epoch that the next life would continue."""
        return int((self.epochs._directory / "epoch").read_bytes().split()[2])
