"""The part check: correctness on this device. Tests, attention backends with tiny models, texts of real processes."""

from __future__ import annotations

from collections.abc import Sequence

from .backends import try_backends
from .cases import Case
from .device_tests import run_device_tests
from .setup import Setup
from .worker_text import compare_text

_DTYPES = ("float32", "bfloat16", "float16")
_BLOCK_SIZES = (16, 64, 256)
_TINY_ARCHITECTURE = "llama"


def cases(setup: Setup) -> Sequence[Case]:
    """The longest first."""
    from tests.tiny_models import ARCHITECTURES

    if setup.is_tiny:
        return [
            Case("tests", run_device_tests),
            Case("text llama", compare_text, (_TINY_ARCHITECTURE,)),
            Case("attention llama bfloat16", try_backends, (_TINY_ARCHITECTURE, "bfloat16", _BLOCK_SIZES[:1])),
        ]
    return [
        Case("tests", run_device_tests),
        *(Case(f"text {architecture}", compare_text, (architecture,)) for architecture in ARCHITECTURES),
        *(
            Case(f"attention {architecture} {dtype}", try_backends, (architecture, dtype, _BLOCK_SIZES))
            for architecture in ARCHITECTURES
            for dtype in _DTYPES
        ),
    ]
