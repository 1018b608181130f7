"""Converts a GGUF file to a folder of safetensors, once per file."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ..progress import Progress, heartbeat, quiet_transformers
from .cache_dir import conversion_folder, file_digest, locked


def convert_gguf(gguf: Path, cache_dir: Path, progress: Progress) -> Path:
    """The folder with the file's weights, config, tokenizer and chat template; created if it is missing.

    Safe for concurrent processes: one converts, the others wait. A folder appears only when complete.
    """
    folder = conversion_folder(gguf, file_digest(gguf, cache_dir), cache_dir)
    if folder.is_dir():
        return folder
    with locked(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        started = time.monotonic()
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with heartbeat(progress, f"converting {gguf.name}"):
                _convert(gguf, temporary, progress)
            temporary.chmod(0o755)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        progress(f"converted {gguf.name} in {time.monotonic() - started:.0f} s; kept in {folder}")
    return folder


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    size_mb = gguf.stat().st_size / 1e6
    progress(f"converting {gguf.name} ({size_mb:.0f} MB) to safetensors, once; half a minute per 100 MB")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)
        progress("converting: the tokenizer is done, now the weights")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=dtype_that_keeps(gguf),
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            trust_remote_code=False,
        )
        progress("converting: the weights are unpacked, saving them")
        # A GGUF file has no generation config, but the tokenizer has the end-of-text id.
        if model.generation_config.eos_token_id is None:
            model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(folder)


def dtype_that_keeps(gguf: Path) -> torch.dtype:
    """float32 and float16 files keep their precision; for quantised ones bfloat16 is precise enough."""
    kinds = {tensor.tensor_type for tensor in GGUFReader(gguf).tensors if len(tensor.shape) > 1}
    if kinds == {GGMLQuantizationType.F32}:
        return torch.float32
    if kinds == {GGMLQuantizationType.F16}:
        return torch.float16
    return torch.bfloat16
