"""Single messages with which a stranger tries to harm a manager or its workers, and what each is answered.

One table for two places: `tests/cache_service/edge` sends each message to a manager in the process of the test, and looks at all of
its state; `tests/hostile` sends all of them to a running cluster, and looks at the texts of those whom it serves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, cast

import grpc

from kvpool.cache_service.core.messages import Limits
from kvpool.cache_service.request_sizes import SERVICE, request_limits
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc, common_pb2
from tests.attacks.spoil import spoil
from tests.rich_status import code_of

LARGEST: Final = (1 << 64) - 1
NO_MESSAGE: Final = (b"\x0a\x04\xff\xfe", b"\x0a\x7f\x01")
"""A field of four bytes, of which two are there; and one that is cut off. No type of message has either."""
BY_SIZE: Final = {
    path: limit.num_bytes for path, limit in request_limits(Limits()).items() if limit.num_bytes < MAX_MESSAGE_BYTES
}
"""The largest request in bytes by path, where it is not the transport that refuses what is longer."""
PATHS: Final = tuple(f"/{SERVICE}/{method.name}" for method in pb.DESCRIPTOR.services_by_name["CacheService"].methods)


@dataclass
class Scene:
    """Whom the attacker finds, and what it has itself."""

    channel: grpc.aio.Channel
    """To the manager."""
    victim: pb.WorkerDescription
    """A worker that decodes a sequence, with all that Describe shows of it."""
    session: int
    """The attacker's own."""
    session_key: bytes
    """With which it leads every call, also in the sessions of others."""
    introduction: pb.RegisterRequest
    """Of one more worker, in order; messages spoil a copy."""

    @property
    def stub(self) -> cache_pb2_grpc.CacheServiceStub:
        return cache_pb2_grpc.CacheServiceStub(self.channel)

    def foreign(self, **fields: Any) -> pb.Uplink:
        """An uplink in the victim's session: all that it needs but the key is in Describe."""
        head = {"call_no": self.victim.totals.num_calls + 1, "session_key": self.session_key, **fields}
        return pb.Uplink(session=self.victim.session, **head)

    def own(self, **fields: Any) -> pb.Uplink:
        return pb.Uplink(session=self.session, session_key=self.session_key, **fields)


Send = Callable[[Scene], Awaitable[Any]]


class Attack(NamedTuple):
    """A message, and the reason for which it is refused."""

    name: str
    send: Send
    reason: str = "BAD_FIELD"
    field: str = ""
    """Which the refusal names."""
    words: tuple[str, ...] = ()
    """Which it has."""

    @property
    def code(self) -> grpc.StatusCode:
        return code_of(self.reason)

    def __str__(self) -> str:
        return self.name


# -- in the session of another, without its key


def _allocate(scene: Scene) -> Awaitable[Any]:
    wish = pb.ReserveWish(tier=common_pb2.TIER_DEVICE, num_blocks=9)
    item = pb.AllocateItem(
        key=common_pb2.SequenceKey(sequence_id="stranger", attempt=1),
        root=common_pb2.Root(model_fingerprint=scene.victim.model_fingerprint),
        tokens=pack_tokens(range(9)),
        max_new_tokens=1,
        no_wait=True,
    )
    return scene.stub.Allocate(pb.AllocateRequest(uplink=scene.foreign(reserve_wishes=[wish]), items=[item]))


def _invented(scene: Scene) -> pb.SequenceUpdate:
    """Tokens after those of the victim's first sequence, as if they were computed: a block would be sealed under them."""
    victim, num_tokens = scene.victim.sequences[0], scene.victim.kv_cache_config.block_size
    return pb.SequenceUpdate(
        key=victim.key,
        start=victim.num_tokens,
        tokens=pack_tokens(range(900, 900 + num_tokens)),
        num_computed_tokens=victim.num_tokens + num_tokens,
    )


def _append(scene: Scene) -> Awaitable[Any]:
    return scene.stub.Append(pb.AppendRequest(uplink=scene.foreign(), items=[pb.AppendItem(update=_invented(scene))]))


def _fork(scene: Scene) -> Awaitable[Any]:
    update = pb.SequenceUpdate(key=common_pb2.SequenceKey(sequence_id="stranger", attempt=1), tokens=pack_tokens([1]))
    fork = pb.ForkItem(parent=scene.victim.sequences[0].key, update=update)
    return scene.stub.Fork(pb.ForkRequest(uplink=scene.foreign(), items=[fork]))


def _free(scene: Scene) -> Awaitable[Any]:
    uplink = scene.foreign(call_no=LARGEST, downlink_ack=LARGEST)
    return scene.stub.Free(pb.FreeRequest(uplink=uplink, items=[pb.FreeItem(update=_invented(scene))]))


def _return_the_reserve(scene: Scene) -> Awaitable[Any]:
    blocks = [block for block in scene.victim.blocks if block.state == pb.BLOCK_STATE_RESERVED]
    returned = common_pb2.BlockRun(
        tier=common_pb2.TIER_DEVICE,
        block_ids=[block.block_id for block in blocks],
        generations=[block.generation for block in blocks],
    )
    return scene.stub.Free(pb.FreeRequest(uplink=scene.foreign(returned=[returned])))


def _report(scene: Scene) -> Awaitable[Any]:
    return scene.stub.Report(pb.ReportRequest(uplink=scene.foreign(), part=0, last=True))


def _keep_alive(scene: Scene) -> Awaitable[Any]:
    """Renews the lease of a dead worker, and makes the manager forget what the living one has not heard."""
    request = pb.KeepAliveRequest(
        session=scene.victim.session, session_key=scene.session_key, downlink_ack=LARGEST, draining=True
    )
    request.load.num_running = request.load.num_waiting = (1 << 32) - 1
    request.load.num_uncomputed_tokens = LARGEST
    return scene.stub.KeepAlive(request)


def _deregister(scene: Scene) -> Awaitable[Any]:
    return scene.stub.Deregister(pb.DeregisterRequest(session=scene.victim.session, session_key=scene.session_key))


FOREIGN: Final = tuple(
    Attack(f"{name} in another's session", send, "WRONG_KEY", words=("session_key",))
    for name, send in {
        "Allocate": _allocate,
        "Append": _append,
        "Fork": _fork,
        "Free": _free,
        "Free with the reserve": _return_the_reserve,
        "Report": _report,
        "KeepAlive": _keep_alive,
        "Deregister": _deregister,
    }.items()
)


# -- numbers, with the right key


def _numbered(scene: Scene, method: str) -> Awaitable[Any]:
    request: Any = getattr(pb, f"{method}Request")(uplink=scene.own(call_no=LARGEST))
    called: Awaitable[Any] = getattr(scene.stub, method)(request)
    return called


def _acknowledge(scene: Scene) -> Awaitable[Any]:
    return scene.stub.KeepAlive(
        pb.KeepAliveRequest(session=scene.session, session_key=scene.session_key, downlink_ack=LARGEST)
    )


NUMBERS: Final = (
    *(
        Attack(f"{method} with call_no 2^64-1", partial(_numbered, method=method), field="uplink.call_no")
        for method in ("Allocate", "Append", "Fork", "Free", "Report")
    ),
    Attack("KeepAlive with downlink_ack 2^64-1", _acknowledge, field="downlink_ack"),
)


# -- registrations


def _introduction(scene: Scene) -> pb.RegisterRequest:
    request = pb.RegisterRequest()
    request.CopyFrom(scene.introduction)
    return request


def _in_its_name(scene: Scene, plus: int) -> Awaitable[Any]:
    """The victim's name, and an incarnation so much larger than its own; `plus` 0: its own."""
    request = _introduction(scene)
    request.worker_id = scene.victim.worker_id
    request.incarnation = min(scene.victim.incarnation + plus, LARGEST)
    request.register_no, request.process_key, request.predecessor_key = LARGEST, b"made up", b"made up"
    return scene.stub.Register(request)


def _spoiled(scene: Scene, path: str, value: object) -> Awaitable[Any]:
    request = _introduction(scene)
    spoil(request, path, value)
    return scene.stub.Register(request)


_SPOILED: Final[tuple[tuple[str, object], ...]] = (
    ("worker_id", ""),
    ("worker_id", "w" * 129),
    ("address", "a" * 257),
    ("model_fingerprint", "é" * 65),
    ("model_name", "m" * 10_000),
    ("kv_cache_config.block_size", 24),
    ("kv_cache_config.pools[0].num_blocks", 1),
    ("kv_cache_config.pools[0].num_blocks", (1 << 32) - 1),
    ("kv_cache_config.pools", common_pb2.KVCachePool(tier=common_pb2.TIER_HOST, num_blocks=9)),
    ("kv_cache_config.groups", None),
    ("kv_cache_config.groups[0].group", 1),
    ("kv_cache_config.pools[0].group", 1),
    ("kv_cache_config.pools[0].tier", common_pb2.TIER_HOST),
    ("highest_epoch_seen", 1 << 40),
    ("highest_epoch_seen", LARGEST),
)


def _shown(value: object) -> str:
    return "another" if not isinstance(value, str | int) else repr(value) if len(repr(value)) < 24 else "too long"


REGISTRATIONS: Final = (
    *(
        Attack(f"{what} in a living worker's name", partial(_in_its_name, plus=plus), reason)
        for what, plus, reason in (
            ("incarnation 2^64-1", LARGEST, "WORKER_ELSEWHERE"),
            ("the next incarnation", 1, "WORKER_ELSEWHERE"),
            ("its incarnation", 0, "STALE_INCARNATION"),
        )
    ),
    *(
        Attack(
            f"Register with {path} {_shown(value)}",
            partial(_spoiled, path=path, value=value),
            field=path.removesuffix(".num_blocks"),
        )
        for path, value in _SPOILED
    ),
)


# -- bytes


def _bytes(scene: Scene, path: str, payload: bytes) -> Awaitable[Any]:
    # Watch too: it is refused before it streams.
    call: Any = scene.channel.unary_unary(path)
    return cast(Awaitable[Any], call(payload))


def _of_bytes() -> Iterator[Attack]:
    for path in PATHS:
        for number, payload in enumerate(NO_MESSAGE, 1):
            send = partial(_bytes, path=path, payload=payload)
            yield Attack(f"no message {number} at {path}", send, "MALFORMED")
        if path in BY_SIZE:
            # Of an unknown field, which a parser would take.
            limit = BY_SIZE[path]
            send, words = partial(_bytes, path=path, payload=bytes(limit + 1)), (str(limit), str(limit + 1))
            yield Attack(f"one byte too many at {path}", send, "TOO_LARGE", words=words)


BYTES: Final = tuple(_of_bytes())
ALL: Final = (*FOREIGN, *NUMBERS, *REGISTRATIONS, *BYTES)
