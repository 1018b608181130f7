"""Models for clusters, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny_models import TinyModel, make_tiny_model

ENDLESS_MODEL_LEN = 1 << 16
"""Minutes of generation: whatever a test does to a stream, it does to a living one."""


def make_endless_model(folder: Path, *, architecture: str = "llama", tokenizer: bool = False) -> TinyModel:
    """A tiny model for very long texts; no token ends one. With a tokenizer of one token per character if asked for."""
    tiny = make_tiny_model(architecture, folder, tokenizer=tokenizer)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = ENDLESS_MODEL_LEN
    path.write_text(json.dumps(config))
    return tiny
