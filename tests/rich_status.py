"""What a call that has failed says: the rich status of its trailing metadata, and its details."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

Detail = TypeVar("Detail", bound=Message)


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status; empty where the transport has answered."""
    return rpc_status.from_call(error) or status_pb2.Status()  # type: ignore[arg-type]


def detail(status: status_pb2.Status, kind: type[Detail]) -> Detail:
    """The one detail of a kind that a status has."""
    found = kind()
    (packed,) = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    packed.Unpack(found)
    return found


def reason_of(status: status_pb2.Status) -> str:
    """The ErrorInfo's reason, whose domain must be ours; empty if the status has no details."""
    if not status.details:
        return ""
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info.domain == "kvpool"
    return str(info.reason)


def position_of(status: status_pb2.Status) -> int:
    """The position that a GAP or TOKENS_DIFFER names."""
    return int(detail(status, error_details_pb2.ErrorInfo).metadata["position"])


def field_of(status: status_pb2.Status) -> str:
    """The one field that a bad request names."""
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    return str(violation.field)


def _published_codes() -> dict[str, str]:
    """Reason to code, as the table at the top of cache.proto has it."""
    proto = Path(__file__).parents[1] / "protos" / "kvpool" / "v1" / "cache.proto"
    names = frozenset(code_pb2.Code.keys())
    codes: dict[str, str] = {}
    code = ""
    for line in proto.read_text().partition("syntax =")[0].splitlines():
        if not line.startswith("//   "):
            continue
        # The first column, the case in words, may name other reasons.
        words = re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", line[48:].partition("(+")[0])
        if words and words[0] in names:
            code = words.pop(0)
        codes |= dict.fromkeys(words, code)
    return codes


CODES: Final = _published_codes()
"""Of the manager, by reason."""


def code_of(reason: str) -> grpc.StatusCode:
    """The code of a call that the manager refuses for a reason. Bytes that are no message have no row in the table."""
    return grpc.StatusCode[CODES.get(reason, "INVALID_ARGUMENT")]
