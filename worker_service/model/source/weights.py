"""Selects a model's weights files: safetensors, else one GGUF file, never a pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from ..errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt"})


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
