"""What the CPUs of this machine can do, as /proc/cpuinfo says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu import cpu_info

X86 = "processor\t: {n}\nflags\t\t: fpu avx2 avx512f avx512_bf16 {more}\n\n"
ARM = "processor\t: {n}\nFeatures\t: fp asimd {more}\n\n"


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (X86, ["amx_bf16 amx_tile", "amx_bf16 amx_tile"], "amx_bf16"),
        (X86, ["amx_int8 amx_tile", "amx_int8 amx_tile"], None),
        (X86, ["amx_bf16", ""], None),
        (ARM, ["i8mm bf16"], "bf16"),
        (ARM, ["i8mm"], None),
    ],
    ids=["AMX", "AMX for integers", "AMX in one of two kinds of CPU", "Arm with BFMMLA", "Arm without"],
)
def test_a_matrix_unit_for_bfloat16(
    text: str, more: list[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vectors alone, such as avx512_bf16, are none; and there is none for float32."""
    file = tmp_path / "cpuinfo"
    file.write_text("".join(text.format(n=n, more=flags) for n, flags in enumerate(more)))
    monkeypatch.setattr(cpu_info, "CPU_INFO", file)
    assert cpu_info.matrix_unit("bfloat16") == expected
    assert cpu_info.matrix_unit("float32") is None
