"""Checks the files of a model folder before a library reads them: a broken one is named in one sentence. Weights are safetensors,
else one GGUF file, never a pickle. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from kvpool.protocol.sampling import SAMPLING_OPTIONS

from ..errors import ModelError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_OBJECTS = (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "chat_template.json",
)
_TEXTS = ("chat_template.jinja",)
_POINTER = b"version https://git-lfs.github.com/spec/"
_NUMBERS = frozenset(
    {"typical_p", "length_penalty", "max_length", "min_length", "max_new_tokens", "min_new_tokens", "num_beams"}
    | {name for name, option in SAMPLING_OPTIONS.items() if option.is_of_files and option.default in (0, 1)}
)
"""Fields of generation_config.json."""
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""Bytes, the limit of the safetensors library."""
QUANTIZER_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}
"""Files of their own in which quantizers describe themselves."""
_PACKED_TYPES = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
"""Types of safetensors of weights that only a quantizer can unpack; so are all of 8 bits and less, such as F8_E4M3 and F4."""


class StoredTensor(NamedTuple):
    """A tensor as a file's header describes it."""

    dtype: str
    """Type as safetensors spells it, e.g. BF16."""
    shape: tuple[int, ...]


def check_small_files(folder: Path) -> None:
    """Check config, tokenizer and other small files as far as they are there. Raises ModelError."""
    for name in _OBJECTS:
        if is_there(folder / name):
            content = read_object(folder / name)
            if name == CONFIG:
                _check_config(folder / name, content)
            elif name == GENERATION_CONFIG:
                _check_numbers(folder / name, content)
    for name in _TEXTS:
        if is_there(folder / name):
            read_text(folder / name)
    for name, quantizer in QUANTIZER_FILES.items():
        if is_there(folder / name):
            raise _quantized(folder, quantizer, f"it has {name}")


def check_weights(folder: Path) -> dict[str, StoredTensor]:
    """Check that the safetensors of the folder are whole. Returns their tensors by name. Raises ModelError."""
    tensors: dict[str, StoredTensor] = {}
    for name in stored_weights(folder):
        tensors |= read_header(folder / name)
    for name, tensor in tensors.items():
        is_packed = tensor.dtype in _PACKED_TYPES or tensor.dtype.startswith(("F8", "F6", "F4"))
        if is_packed and name.endswith("weight") and len(tensor.shape) > 1:
            raise _quantized(folder, "", f"{name} has the type {tensor.dtype}")
    return tensors


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of that name, even one that cannot be read."""
    return path.exists() or path.is_symlink()


def read_bytes(path: Path) -> bytes:
    """The file's content. Raises ModelError if it cannot be read, or is a pointer of git-lfs."""
    _require_no_folder(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    require_no_pointer(path, content[: len(_POINTER)])
    return content


def read_text(path: Path) -> str:
    """The file's content as UTF-8. Raises ModelError."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8: {error}. Fetch the file again.") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ModelError."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not text.strip() else f"is not valid JSON: {error}"
        raise ModelError(f"{path} {what}. Fetch the file again, or correct it.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {_kind(content)}; needed: a JSON object. Fetch the file again, or correct it.")
    return content


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises ModelError if the file is not whole."""
    _require_no_folder(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(max(_LENGTH_BYTES, len(_POINTER)))
            require_no_pointer(path, start)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            file.seek(_LENGTH_BYTES)
            header = file.read(length) if length <= min(size, _LONGEST_HEADER) else b""
    except OSError as error:
        raise unreadable(path, error) from error
    if size < _LENGTH_BYTES or len(header) < length:
        raise ModelError(
            f"{path} is cut short, or is no safetensors file: it has {size:,} bytes, fewer than its header. Fetch it again."
        )
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        tensors = {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header: it is no safetensors file. Fetch it again.") from error
    if size != _LENGTH_BYTES + length + end:
        expected = _LENGTH_BYTES + length + end
        what = "is cut short" if size < expected else "is damaged"
        raise ModelError(
            f"{path} {what}: by its header it has {expected:,} bytes, but there are {size:,}. Fetch it again."
        )
    return tensors


def require_gguf(path: Path) -> None:
    """Raises ModelError if the file cannot be read, or is no GGUF file by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise unreadable(path, error) from error
    require_no_pointer(path, start)
    if not start.startswith(b"GGUF"):
        raise ModelError(f"{path} is no GGUF file: it does not begin with the letters GGUF. Fetch it again.")


def require_no_pointer(path: Path, start: bytes) -> None:
    """Raises ModelError if the file that starts so is a pointer of git-lfs."""
    if start.startswith(_POINTER[: len(start)]) and len(start) >= _LENGTH_BYTES:
        raise ModelError(
            f"{path} is a pointer of git-lfs, not the file itself. Run `git lfs pull` in its folder, or fetch the model again."
        )


def _require_no_folder(path: Path) -> None:
    if path.is_dir():
        raise ModelError(f"{path} is a folder; needed: the model's file of that name. Fetch the model again.")


def unreadable(path: Path, error: OSError) -> ModelError:
    """The error of a file that the system does not let us read."""
    return ModelError(f"{path} cannot be read: {error.strerror or error}. Give this user the right to read it.")


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError if a quantizer packed the weights."""
    for quantization in _quantizations(config):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if not isinstance(method, str):
            is_bitsandbytes = isinstance(quantization, dict) and {"load_in_4bit", "load_in_8bit"} & quantization.keys()
            method = "bitsandbytes" if is_bitsandbytes else ""
        raise _quantized(path.parent, method, "its config.json has a quantization_config")


def _check_numbers(path: Path, content: Mapping[str, Any]) -> None:
    """Raises ModelError if a field is no number that must be one: transformers keeps it as it is until it is used."""
    for name, value in content.items():
        is_id = name.endswith("_token_id")
        if not is_id and name not in _NUMBERS:
            continue
        values = value if is_id and isinstance(value, list) else [value]
        if not all(entry is None or (type(entry) is int) or (type(entry) is float and not is_id) for entry in values):
            needed = "an id or a list of ids" if is_id else "a number"
            raise ModelError(f"{path} has {_kind(value)} as {name}; needed: {needed}, or null. Correct the file.")


def _quantizations(config: Mapping[str, Any]) -> Iterator[Any]:
    """What quantizers wrote into the config and its parts."""
    for name, value in config.items():
        if name in ("quantization_config", "compression_config") and value:
            yield value
        elif isinstance(value, dict):
            yield from _quantizations(value)


def _quantized(folder: Path, method: str, sign: str) -> ModelError:
    by = f" by {method}" if method else ""
    return ModelError(
        f"{folder} is a quantized checkpoint{by} ({sign}); needed: weights in float32, bfloat16 or float16, or a GGUF file. Give "
        "the model that was quantized; `--quantize int8` makes its weights smaller when it is loaded."
    )


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", str: "text", type(None): "null", bool: "true or false"}
    return names.get(type(value), "a number")


def only_gguf(where: str, names: Collection[str]) -> str | None:
    """The one GGUF file among the names; None if there are safetensors.

    Raises ModelError if there is neither, or more than one GGUF file. `where`: the folder or repo, for the message.
    """
    suffixes = {name: PurePosixPath(name).suffix for name in sorted(names)}
    if ".safetensors" in suffixes.values():
        return None
    ggufs = [name for name, suffix in suffixes.items() if suffix == ".gguf"]
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs and all(map(_PART.search, ggufs)):
        raise ModelError(
            f"{where} has the parts of one model ({', '.join(ggufs)}). Join them with `llama-gguf-split --merge` and give the file "
            "that it writes."
        )
    if ggufs:
        raise ModelError(
            f"{where} has several GGUF files ({', '.join(ggufs)}); give the path of the one to use (`hf download` fetches "
            "one from the hub and prints its path)."
        )
    for name, suffix in suffixes.items():
        if suffix in _PICKLED:
            raise ModelError(
                f"{where} has only pickled weights ({name}), which can run code when loaded and are refused. "
                "Save the model again with save_pretrained, which writes *.safetensors."
            )
    raise ModelError(f"{where} has neither *.safetensors nor *.gguf weights.")


def safetensors_names(where: str, folder: Path, names: Collection[str]) -> list[str]:
    """The safetensors files that transformers loads, by name.

    `names`: the files of the model; only the index need be in `folder`. Raises ModelError.
    """
    if SINGLE in names:
        return [SINGLE]
    if INDEX not in names:
        raise ModelError(f"{where} has neither {SINGLE} nor {INDEX}; save the model again with save_pretrained.")
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{where} has an {INDEX} without a weight_map of file names: {error!r}.") from error
    for shard in shards:
        if shard not in names:
            raise ModelError(f"{where} has no {shard!r}, which its {INDEX} names; complete the model's files.")
    return shards


def stored_weights(folder: Path) -> list[str]:
    """The safetensors files of a folder that transformers loads, by name. Raises ModelError."""
    return safetensors_names(str(folder), folder, {file.name for file in folder.iterdir()})
