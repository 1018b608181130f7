"""Set one field of a message, however deep, to what is wrong there."""

from __future__ import annotations

import re
from typing import Any

from google.protobuf.message import Message


def spoil(message: Any, path: str, value: object) -> None:
    """Set the field at a path like "pools[0].tier"; None clears it, a message is appended to it."""
    *parents, name = re.findall(r"\w+", path)
    for part in parents:
        message = message[int(part)] if part.isdigit() else getattr(message, part)
    if value is None:
        message.ClearField(name)
    elif isinstance(value, Message):
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
