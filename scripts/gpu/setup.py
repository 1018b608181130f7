"""Where a run runs, and how large it is: what all parts are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setup:
    """A run on a device."""

    device: str
    """As torch names it: cuda:0, cpu."""
    is_tiny: bool
    """The same code over the smallest models and a few cases, for a CPU."""
    folder: Path
    """For models and logs; it goes when the run ends."""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")
