"""A model that was found, before transformers has read its config."""

from __future__ import annotations

from typing import Any

from .device import choose_device, cuda_index
from .errors import library_errors
from .length import plain_limit, require_length
from .progress import Progress
from .settings import ModelSettings
from .source.cache_dir import open_cache_dir
from .source.files import check_small_files, read_object, require_gguf
from .source.resolve import ModelSource, find_config


def find_candidate(settings: ModelSettings, progress: Progress) -> ModelSource:
    """Find the model and check what can be checked without the seconds that importing torch and transformers takes.

    That is: cache folder, model, --device (torch is imported only to look for a GPU), and --max-model-len if config.json states
    the limit. `outline_model` checks everything. Raises ModelError, with the text of a start.
    """
    with library_errors(f"{settings.model} cannot be read"):
        source = find_config(settings.model, open_cache_dir(settings.cache_dir), progress)
        config: dict[str, Any] = {}
        if source.gguf is not None:
            require_gguf(source.file)
        else:
            check_small_files(source.path)
            config = read_object(source.file)
    limit = plain_limit(config)
    if limit is not None and settings.max_model_len is not None:
        require_length(settings.max_model_len, limit)
    if cuda_index(settings.device) is not None:
        choose_device(settings.device)
    architecture = config.get("model_type")
    return source._replace(architecture=architecture if isinstance(architecture, str) else None)
