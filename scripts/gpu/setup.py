"""Device and scale of a run, for all parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setup:
    """A run on a device."""

    device: str
    """torch's name: cuda:0, cpu."""
    is_tiny: bool
    """The same code with the smallest models and a few cases, for a CPU."""
    folder: Path
    """For models and logs; removed at the end."""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")
