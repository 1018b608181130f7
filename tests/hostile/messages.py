"""Messages that no peer of ours would send, made from descriptors and a seed.

55 % filled with values at the edges, 15 % such messages with their bytes changed, 20 % random bytes, 10 % with strings that are not
UTF-8.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_SMALL: Final = (0, 1, 2, 3, 15, 16, 17, 64, 255, 256, 4095, 65_535, 65_536)
_UNSIGNED: Final = (*_SMALL, 1 << 20, (1 << 20) + 1, 1 << 24, (1 << 31) - 1)
_UINT32: Final = (*_UNSIGNED, 1 << 31, (1 << 32) - 1)
_INT32: Final = (*_UNSIGNED, -1, -(1 << 31))
_FLOATS: Final = (0.0, -0.0, 0.5, 1.0, 2.5, -1.0, 1e-45, 3.4e38, float("inf"), float("-inf"), float("nan"))
_EDGES: Final[dict[int, Sequence[Any]]] = {
    FieldDescriptor.CPPTYPE_UINT32: _UINT32,
    FieldDescriptor.CPPTYPE_UINT64: (*_UINT32, 1 << 32, 1 << 40, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT32: _INT32,
    FieldDescriptor.CPPTYPE_INT64: (*_INT32, (1 << 63) - 1, -(1 << 63)),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 77),
    FieldDescriptor.CPPTYPE_FLOAT: _FLOATS,
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
}
"""Values at the edges of what a field can say. Strings have their own."""
_LENGTHS: Final = (0, 1, 2, 3, 4, 5, 7, 16, 31, 32, 33, 64, 128, 129, 256, 257, 1024, 4096, 70_000)
_MARK: Final = "MARKMARK"
"""Replaced by bytes of the same length that are not UTF-8."""
_NOT_UTF8: Final = (
    b"\xff\xfe\xfd\xfc\xff\xfe\xfd\xfc",
    b"\xc3\x28\xa0\xa1\xe2\x28\xa1\x80",
    b"\xed\xa0\x80\xed\xb0\x80\xf5\x80",
)
_STRINGS: Final = (
    *("", "a", "[/x]", "[bold red]x", "\x1b]0;x\x07\x1b[2J", "\x00", "a\nb\r", "\u202eabc"),
    *("é" * 64, "\U0001f600" * 33, "{}%s%n", "../../etc"),
    *("x" * length for length in (128, 129, 257, 5000)),
)
_MAX_DEPTH: Final = 6

Known = Mapping[str, Callable[[random.Random], Any]]
"""By name of a field: a value that gets further than any made up."""


class MessageMaker:
    """Makes messages of any type; the same seed makes the same ones, as long as `known` gives the same values."""

    def __init__(self, draw: random.Random, known: Known) -> None:
        self._draw = draw
        self._known = known

    def payload(self, descriptor: Descriptor) -> bytes:
        """The bytes of one message, by the mix that the module names."""
        kind = self._draw.random()
        if kind < 0.55:
            return _serialised(self.filled(descriptor))
        if kind < 0.70:
            return self._mutated(_serialised(self.filled(descriptor)))
        if kind < 0.90:
            return self._draw.randbytes(self._draw.choice(_LENGTHS))
        return self._not_utf8(descriptor)

    def filled(self, descriptor: Descriptor, *, strings: Sequence[str] = _STRINGS, depth: int = 0) -> Message:
        """A message of which most fields are set, to values at the edges of what they can say."""
        draw = self._draw
        message = GetMessageClass(descriptor)()
        chosen = {oneof.name: draw.choice(oneof.fields).name for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            oneof = field.containing_oneof
            if oneof is not None and chosen[oneof.name] != field.name:
                continue
            if depth < _MAX_DEPTH and draw.random() < 0.85:
                self._fill(message, field, strings, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, strings: Sequence[str], depth: int) -> None:
        draw = self._draw
        known = self._known.get(field.name)
        if known is not None and not field.is_repeated and draw.random() < 0.9:
            value = known(draw)
            if value is not None:
                setattr(message, field.name, value)
            return
        if not field.is_repeated:
            if field.message_type is None:
                setattr(message, field.name, self._scalar(field, strings))
            else:
                getattr(message, field.name).CopyFrom(self.filled(field.message_type, strings=strings, depth=depth + 1))
            return
        target = getattr(message, field.name)
        count = draw.choice((0, 1, 1, 1, 2, 3, 17)) if depth else draw.choice((0, 1, 1, 2, 3, 40))
        for _ in range(count):
            if field.message_type is None:
                target.append(self._scalar(field, strings))
            elif field.message_type.GetOptions().map_entry:
                name, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
                if value.message_type is None:
                    target[self._scalar(name, strings)] = self._scalar(value, strings)
            else:
                target.append(self.filled(field.message_type, strings=strings, depth=depth + 1))

    def _scalar(self, field: FieldDescriptor, strings: Sequence[str]) -> Any:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._bytes()
        return self._draw.choice(_EDGES.get(field.cpp_type, strings))

    def _bytes(self) -> bytes:
        """Often whole token ids of a small vocabulary, else anything."""
        draw = self._draw
        if draw.random() < 0.6:
            return b"".join(
                draw.randrange(256).to_bytes(4, "little") for _ in range(draw.choice((1, 4, 16, 24, 33, 64)))
            )
        return draw.randbytes(draw.choice(_LENGTHS))

    def _mutated(self, payload: bytes) -> bytes:
        """With some bytes changed, left out, put in, repeated, or cut off."""
        draw = self._draw
        changed = bytearray(payload)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(changed) + 1)
            match draw.randrange(5):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << draw.randrange(8)
                case 1:
                    changed[at:at] = draw.randbytes(draw.randint(1, 8))
                case 2:
                    del changed[at : at + draw.randint(1, 8)]
                case 3:
                    changed[at:at] = changed[max(0, at - 12) : at]
                case _:
                    del changed[at:]
        return bytes(changed)

    def _not_utf8(self, descriptor: Descriptor) -> bytes:
        """With strings that are not UTF-8; where there is no string, what is no message at all."""
        payload = _serialised(self.filled(descriptor, strings=(_MARK,)))
        if _MARK.encode() not in payload:
            return b"\x0a\x04\xff\xfe\xfd\xfc"
        return payload.replace(_MARK.encode(), self._draw.choice(_NOT_UTF8))


def _serialised(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)
