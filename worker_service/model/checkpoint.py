"""Loads the weights of a model whole, or refuses them: transformers draws what a checkpoint lacks at random, with a warning."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from transformers.core_model_loading import revert_weight_conversion

from .errors import ModelError, library_errors
from .progress import quiet_transformers

_NUM_NAMED: Final = 3
_REPORT = "LOAD REPORT"
"""Marks transformers' own report of what did not fit, many lines long."""


Spelling = Callable[[Any, str], set[str]]
"""Gives the names that a checkpoint has for a tensor of the model: several, if the tensor is merged from them."""


def load_whole(
    auto: Any, checkpoint: Path, names: Collection[str], spelling: Spelling, **options: Any
) -> tuple[Any, list[str]]:
    """The model that `auto.from_pretrained` makes of a folder, or of the GGUF file with its options, with every parameter and
    persistent buffer from the checkpoint, tied to one that is, or computed by its class; and the tensors of the checkpoint that it
    does not use.

    names: the tensors of the checkpoint. Raises ModelError.
    """
    folder = checkpoint.parent if "gguf_file" in options else checkpoint
    with quiet_transformers(), _quiet_report(), library_errors(f"transformers cannot load the weights of {checkpoint}"):
        try:
            model, loading_info = auto.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                # So that the error names them all.
                ignore_mismatched_sizes=True,
                **options,
            )
        except RuntimeError as error:
            _refuse_unconvertible(auto, checkpoint, names, spelling, options["config"], error)
            raise
    missing = {*loading_info["missing_keys"], *_ignored(model, names)}
    missing = {name for name in missing if not _is_computed(model, name)}
    mismatched = {name: (tuple(there), tuple(needed)) for name, there, needed in loading_info["mismatched_keys"]}
    unused = sorted(loading_info["unexpected_keys"])
    if missing or mismatched:
        lacking = _lacking(model, [*missing, *mismatched], names, spelling) or sorted(missing)
        raise incomplete(checkpoint, lacking, unused) if lacking else _misshapen(checkpoint, mismatched)
    return model, unused


def incomplete(checkpoint: Path, lacking: Sequence[str], unused: Sequence[str] = ()) -> ModelError:
    """The error of a checkpoint without these tensors; unused: those that the model does not use."""
    others = f" It has {listed(unused)}, which the model does not use." if unused else ""
    return ModelError(
        f"{checkpoint} is incomplete: the model needs {listed(lacking)}, which no file there has.{others} Fetch the model again, "
        "or give the config.json that these weights were saved with."
    )


def listed(names: Sequence[str], what: str = "tensors") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NUM_NAMED} more {what}" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more


def stored_spelling(model: Any, name: str) -> set[str]:
    """The names that transformers gives the tensor when it saves the model: several, if it is merged at load, as experts are."""
    model._weight_conversions = None  # those of its type, and not of the checkpoint that it is from
    try:
        return set(revert_weight_conversion(model, {name: model.state_dict()[name].to("meta")}))
    except Exception:  # of a conversion that works for a whole state only
        return {name}


def _misshapen(folder: Path, mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> ModelError:
    shapes = [
        f"{name} ({list(there)} instead of {list(needed)})" for name, (there, needed) in sorted(mismatched.items())
    ]
    return ModelError(
        f"{folder} does not fit its config: {listed(shapes, 'tensors of another shape')}. Give the config.json that these weights "
        "were saved with."
    )


def _refuse_unconvertible(
    auto: Any, folder: Path, names: Collection[str], spelling: Spelling, config: Any, error: Exception
) -> None:
    """Raises ModelError if tensors that transformers would merge are missing, as one expert of many."""
    with torch.device("meta"):
        model = auto.from_config(config)
    tied = getattr(model, "all_tied_weights_keys", {})
    lacking = _lacking(model, [name for name in model.state_dict() if name not in tied], names, spelling)
    if lacking:
        raise incomplete(folder, lacking) from error


def _lacking(model: Any, required: Iterable[str], names: Collection[str], spelling: Spelling) -> list[str]:
    """The required tensors of the model that the checkpoint has under no name. A checkpoint of the bare model has no prefix."""
    prefix = f"{model.base_model_prefix}."
    stored = {spelled for name in required for spelled in spelling(model, name)}
    return sorted(spelled for spelled in stored if spelled not in names and spelled.removeprefix(prefix) not in names)


def _ignored(model: Any, names: Collection[str]) -> Iterator[str]:
    """Tensors that the checkpoint lacks and that transformers, by a list of the class, does not report.

    That list is right for checkpoints that were written without them: by models that have none in any layer, or by the bare model,
    which has no buffer of the head.
    """
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    prefix = f"{model.base_model_prefix}."
    is_bare = not any(name.startswith(prefix) for name in names)
    for name in model.state_dict() if patterns else ():
        pattern = next((pattern for pattern in patterns if pattern.search(name)), None)
        if pattern is None or name in names or name.removeprefix(prefix) in names:
            continue
        if any(map(pattern.search, names)) or not (is_bare or name.startswith(prefix)):
            yield name


def _is_computed(model: Any, name: str) -> bool:
    """Whether the tensor is a table that its module computes, such as sinusoidal positions."""
    module = model.get_submodule(name.rpartition(".")[0])
    compute = getattr(module, "create_weight", None)
    return compute is not None and torch.equal(compute().to(module.weight), module.weight)


@contextmanager
def _quiet_report() -> Iterator[None]:
    """Suppress transformers' report inside: load_whole raises an error of its own."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return _REPORT not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
