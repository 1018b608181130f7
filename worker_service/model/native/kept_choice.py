"""Which runtime was faster, kept in the cache folder, so that the next start makes the same choice."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..source.cache_dir import write_atomically
from .timing import StepSeconds


class NotKept(RuntimeError):
    """The choice cannot be kept. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The faster runtime, and the figures of both."""

    runtime: Literal["native", "torch"]
    native: StepSeconds
    torch: StepSeconds


@dataclass(frozen=True, slots=True)
class ChoiceFile:
    """The file that keeps the choice of one key."""

    cache_dir: Path
    key: Mapping[str, str | int]
    """All that the choice depends on."""

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(dict(self.key), sort_keys=True).encode()).hexdigest()
        return self.cache_dir / "runtimes" / f"{digest[:32]}.json"

    def read(self) -> Choice | None:
        """The kept choice; None if there is none that is whole."""
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return _choice(found) if isinstance(found, dict) and found.get("key") == self.key else None

    def keep(self, choice: Choice) -> None:
        """Replace the file as a whole. Raises NotKept."""
        content = {
            "key": dict(self.key),
            "runtime": choice.runtime,
            "native": choice.native._asdict(),
            "torch": choice.torch._asdict(),
        }
        try:
            write_atomically(self.path, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise NotKept(f"{self.path} cannot be written: {error.strerror}") from error


def _choice(content: dict[str, Any]) -> Choice | None:
    """Return the choice in a file's content; None if parts of it are missing or have another type."""
    runtime, native, torch = content.get("runtime"), _figures(content.get("native")), _figures(content.get("torch"))
    if runtime not in ("native", "torch") or native is None or torch is None:
        return None
    return Choice(runtime, native, torch)


def _figures(content: Any) -> StepSeconds | None:
    if not isinstance(content, dict) or set(content) != set(StepSeconds._fields):
        return None
    if not all(isinstance(value, float) and math.isfinite(value) and value >= 0 for value in content.values()):
        return None
    return StepSeconds(**content)
