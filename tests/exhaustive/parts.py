"""What a world is made of, frozen: the manager, and each worker. They share nothing that changes; most events change one."""

from __future__ import annotations

import copyreg
import functools
import io
import marshal
import pickle
import sys
from dataclasses import fields
from typing import Any, NamedTuple

from kvpool.cache_service.core.messages import Limits
from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.sequence import SequenceState
from kvpool.worker_service.cache.settings import CacheSettings


class Form:
    """The canonical form of a part: what it is but for absolute numbers, and these, in the order in which a walk comes by them."""

    def __init__(self) -> None:
        self.skeleton = b""
        self.stamps: list[int] = []
        self.sessions: list[int] = []
        self.calls: list[tuple[int, int]] = []
        """Each with its session, as the next."""
        self.entries: list[tuple[int, int]] = []
        self.registers: list[tuple[int, int, int]] = []

    def of(self, skeleton: Any) -> Form:
        """The whole form, once all numbers are there."""
        self.skeleton = marshal.dumps(skeleton, 2)
        return self


class Part(NamedTuple):
    """A manager or a worker as bytes, from which copies are made, and its form. Never changes."""

    data: bytes
    form: Form

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

_PACKAGES = ("kvpool.cache_service.core.", "kvpool.worker_service.cache.", "tests.exhaustive.", "tests.tracer")


def number_classes() -> None:
    """Let pickle look up by number what copies are made of, instead of by module and name: that takes a third off every copy."""
    named = [
        ("array", "_array_reconstructor"),
        *(("collections", name) for name in ("Counter", "OrderedDict", "deque")),
    ]
    named += [(__name__, function.__name__) for function in (_of_kind, _parse, _root)]
    for module in sorted(name for name in sys.modules if name.startswith(_PACKAGES)):
        kinds = vars(sys.modules[module]).items()
        named += [(module, name) for name, kind in kinds if isinstance(kind, type) and kind.__module__ == module]
    for code, (module, name) in enumerate(named, len(copyreg._extension_registry) + 1):  # type: ignore[attr-defined]
        copyreg.add_extension(module, name, code)
