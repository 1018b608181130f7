"""What a world is made of, frozen: the manager, and each worker. They share nothing that changes; most events change one."""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from dataclasses import fields
from typing import Any, NamedTuple

from kvpool.cache_service.core.messages import Limits
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.sequence import SequenceState
from kvpool.worker_service.cache.settings import CacheSettings


class Form(NamedTuple):
    """The canonical form of a part: what it is but for absolute numbers, and these, in the order in which a walk comes by them."""

    skeleton: bytes
    stamps: tuple[int, ...]
    sessions: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]
    """Each with its session, as the next."""
    entries: tuple[tuple[int, int], ...]
    registers: tuple[tuple[int, int, int], ...]


class Part:
    """A manager or a worker as bytes, from which copies are made, and its form. Never changes."""

    __slots__ = ("data", "form")

    def __init__(self, data: bytes, form: Form) -> None:
        self.data = data
        self.form = form

    def __reduce__(self) -> tuple[Any, tuple[bytes, Form]]:
        return Part, (self.data, self.form)

    def copy(self) -> Any:
        return pickle.loads(self.data)


def freeze_object(value: Any) -> bytes:
    into = io.BytesIO()
    _Pickler(into, 5).dump(value)
    return into.getvalue()


@functools.lru_cache(maxsize=512)
def for_reading(part: Part) -> Any:
    """The one copy that nobody may change."""
    return part.copy()


# -- what never changes is shared by all copies


@functools.cache
def _root(model_fingerprint: str, tenant_salt: str) -> common_pb2.Root:
    return common_pb2.Root(model_fingerprint=model_fingerprint, tenant_salt=tenant_salt)


@functools.cache
def _of_kind(kind: Any, *values: Any) -> Any:
    return kind(*values)


@functools.cache
def _reduce_settings(settings: CacheSettings) -> tuple[Any, tuple[Any, ...]]:
    return _of_kind, (CacheSettings, *(getattr(settings, field.name) for field in fields(settings)))


def _parse(kind: Any, data: bytes) -> Any:
    return kind.FromString(data)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()


_Pickler.dispatch_table[Limits] = lambda limits: (_of_kind, (Limits, *limits))
_Pickler.dispatch_table[CacheSettings] = _reduce_settings
_Pickler.dispatch_table[common_pb2.Root] = lambda root: (_root, (root.model_fingerprint, root.tenant_salt))
_Pickler.dispatch_table[SequenceState] = lambda member: (_of_kind, (type(member), member.value))
for _message in (
    cache_pb2.AllocateRequest,
    cache_pb2.AppendRequest,
    cache_pb2.ForkRequest,
    cache_pb2.FreeRequest,
    cache_pb2.ReportRequest,
):
    _Pickler.dispatch_table[_message] = lambda message: (_parse, (type(message), message.SerializeToString()))

_NAMES = {
    "array": "array _array_reconstructor",
    "kvpool.cache_service.core.fencing": "Fencing",
    "kvpool.cache_service.core.block_pool": "BlockPool",
    "kvpool.cache_service.core.hashing": "xxh64",
    "kvpool.cache_service.core.manager": "CacheManager",
    "kvpool.cache_service.core.messages": "Boundary DownlinkEntry Grant Limits Registration Root SequenceKey Stop WorkerLoad",
    "kvpool.cache_service.core.prefix_tree": "Node PrefixTree RootNode",
    "kvpool.cache_service.core.recovery": "Recovery",
    "kvpool.cache_service.core.downlink": "Downlink",
    "kvpool.cache_service.core.session": "Sequence Session",
    "kvpool.cache_service.core.session_key": "SessionKey",
    "collections": "Counter OrderedDict deque",
    "tests.exhaustive.engine": "Copied Part TinyEngine",
    "tests.exhaustive.parts": "_of_kind _parse _root",
    "tests.exhaustive.world": "Peer",
    "tests.tracer": "AnySlots",
    "kvpool.worker_service.cache.engine_cache": "EngineCache",
    "kvpool.worker_service.cache.ledger": "BlockLedger Content",
    "kvpool.worker_service.cache.link_state": "Call LinkState Stated",
    "kvpool.worker_service.cache.report": "Report",
    "kvpool.worker_service.cache.reserve": "DecodingRate Reserve ReservedBlock",
    "kvpool.worker_service.cache.sequence": "CacheSequence SequenceId SequenceState",
    "kvpool.worker_service.cache.groups.dense": "DenseGroup DenseTable",
    "kvpool.worker_service.cache.groups.group": "Statement",
    "kvpool.worker_service.cache.groups.state": "RunningState StateGroup",
    "kvpool.worker_service.cache.groups.window": "Ring WindowGroup",
    "kvpool.worker_service.cache.entry": "Entry",
    "kvpool.worker_service.cache.settings": "CacheSettings",
    "kvpool.worker_service.cache.state": "CacheState",
}
"""What copies are made of most. Pickle looks it up by number instead of by module and name: that takes a third off every copy."""

for _module, _of_module in _NAMES.items():
    for _name in _of_module.split():
        copyreg.add_extension(_module, _name, len(copyreg._extension_registry) + 1)  # type: ignore[attr-defined]
