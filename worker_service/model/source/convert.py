"""Converts a GGUF file to a folder of safetensors, once per file."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ..checkpoint import incomplete, listed, load_whole
from ..errors import ModelError, library_errors
from ..length import is_encoder_decoder
from ..progress import Progress, heartbeat, quiet_transformers
from .cache_dir import conversion_folder, file_digest, locked
from .gguf_config import GgufFile, gguf_config, is_plain, open_gguf, unused_by_design


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
    file = open_gguf(gguf)
    config = gguf_config(file)
    with quiet_transformers(), library_errors(f"transformers cannot read the tokenizer of {gguf}"):
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, config=config, gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)
    progress("converting: the tokenizer is done, now the weights")
    spelling = _Spelling(file.architecture, config)
    model, unused = load_whole(
        AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM,
        gguf,
        file.names,
        spelling,
        config=config,
        gguf_file=gguf.name,
        dtype=_dtype_of(file),
        quantization_config=GgufConfig(dequantize=True),
    )
    spelling.require_whole(model, gguf, file.names)
    unread = sorted(name for name in {*unused, *spelling.unread(model, file.names)} if not unused_by_design(name))
    if unread:
        raise ModelError(
            f"{gguf} has {listed(unread)}, which transformers does not read. Give the model as safetensors."
        )
    progress("converting: the weights are unpacked, saving them")
    # A GGUF file has no generation config, but ids that end a text.
    model.generation_config.eos_token_id = ending_ids(file.reader, tokenizer.eos_token_id)
    model.save_pretrained(folder)


class _Spelling:
    """The names of a model's tensors in a GGUF file, where transformers has a table of them."""

    def __init__(self, architecture: str, config: Any) -> None:
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        self._has_table = architecture not in GGUF_CONFIG_ARCHS
        self._table: dict[str, str] | None = None

    def __call__(self, model: Any, name: str) -> set[str]:
        """The tensors of a file that make up this one of the model; several for experts that are merged."""
        return {stored for stored, other in self._of(model).items() if other == name} or {name}

    def require_whole(self, model: Any, gguf: Path, names: Collection[str]) -> None:
        """Raises ModelError if a part of a merged tensor is missing: transformers fills it with zeros."""
        tied = getattr(model, "all_tied_weights_keys", {})
        state = model.state_dict().keys() - tied
        lacking = sorted(stored for stored, other in self._of(model).items() if other in state and stored not in names)
        if lacking:
            raise incomplete(gguf, lacking)

    def unread(self, model: Any, names: Collection[str]) -> set[str]:
        """Tensors of the file that are none of the model's."""
        return set(names) - self._of(model).keys() if self._has_table else set()

    def _of(self, model: Any) -> dict[str, str]:
        if self._table is None:
            table = get_gguf_hf_weights_map(model, self._processor) if self._has_table else {}
            # Experts have no suffix in the table, because they have none in the model.
            self._table = {f"{name}.weight" if name.endswith("_exps") else name: other for name, other in table.items()}
        return self._table


def ending_ids(reader: Any, eos_token_id: int | None) -> list[int] | None:
    """Ids of the end of text and of the end of a turn; None: the file states none."""
    fields = [reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids = [eos_token_id, *(int(field.contents()) for field in fields if field is not None)]
    return sorted({token_id for token_id in ids if token_id is not None}) or None


def dtype_that_keeps(gguf: Path) -> torch.dtype:
    """The smallest type that has every matrix of a file exactly; of quantized ones bfloat16 is precise enough."""
    return _dtype_of(open_gguf(gguf))


def _dtype_of(file: GgufFile) -> torch.dtype:
    kinds = {tensor.tensor_type for tensor in file.reader.tensors if len(tensor.shape) > 1}
    if not all(map(is_plain, kinds)) or kinds == {GGMLQuantizationType.BF16}:
        return torch.bfloat16
    return torch.float16 if kinds == {GGMLQuantizationType.F16} else torch.float32
