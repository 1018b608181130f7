"""A model by its config alone: whether it is there, and whether device and length suit it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .progress import Progress
from .settings import ModelSettings
from .source.cache_dir import open_cache_dir
from .source.resolve import ConfigSource, find_config


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A model that was found and is not checked any more closely."""

    source: ConfigSource
    config: Any
    device: str
    """cpu or cuda:N."""
    max_model_len: int

    def __str__(self) -> str:
        return f"{self.source.name} ({self.config.model_type}) on {self.device}, sequences of up to {self.max_model_len:,} tokens"


def find_candidate(settings: ModelSettings, progress: Progress) -> Candidate:
    """Find the model and read its config; no weights. What is quick to find wrong comes first.

    Raises ModelError for a cache folder, model, device or --max-model-len that a start would refuse.
    """
    source = find_config(settings.model, open_cache_dir(settings.cache_dir), progress)
    # Here and not above: the import of torch and transformers takes seconds.
    from .placement import choose_device, choose_max_model_len, read_config

    device = str(choose_device(settings.device))
    config = read_config(source.path, source.gguf)
    return Candidate(source, config, device, choose_max_model_len(config, settings.max_model_len))
