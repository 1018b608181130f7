"""The longest sequence by config.json alone: equal to what transformers makes of the file, or left to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.length import choose_max_model_len, plain_limit
from kvpool.worker_service.model.placement import read_config
from tests.tiny_models import ARCHITECTURES

LIMIT = 777


def config_json(model_type: str, folder: Path) -> dict[str, Any]:
    """The content of config.json that transformers writes, with its own name of the limit. The file is in the folder."""
    AutoConfig.for_model(model_type, max_position_embeddings=LIMIT).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_bytes())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "gpt_bigcode", "gptj", "codegen", "openai-gpt"])
def test_the_limit_of_a_text_model_is_the_one_of_transformers(model_type: str, tmp_path: Path) -> None:
    assert plain_limit(config_json(model_type, tmp_path)) == LIMIT
    config = read_config(tmp_path)
    assert choose_max_model_len(config, LIMIT) == LIMIT
    with pytest.raises(ModelError, match=f"--max-model-len {LIMIT + 1} is not within 2 … {LIMIT},"):
        choose_max_model_len(config, LIMIT + 1)


def test_the_limit_of_a_composite_model_is_the_one_of_its_text_config() -> None:
    text = {"model_type": "mistral", "max_position_embeddings": LIMIT}
    composite = {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}}
    assert plain_limit(composite) == LIMIT
    config = AutoConfig.for_model(**composite)
    assert choose_max_model_len(config, LIMIT) == LIMIT


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"model_type": "llama"},  # a default of the class
        {"model_type": "gpt2", "n_positions": 5, "max_position_embeddings": 6},
        {"model_type": "t5", "n_positions": 5},  # of relative positions, which have no limit
        {"model_type": "llama", "max_position_embeddings": None},
        {"model_type": "llama", "max_position_embeddings": "5"},
        {"model_type": "llama", "max_position_embeddings": 5.5},
        {"model_type": "llava", "max_position_embeddings": 5, "vision_config": {}},
        {"model_type": "llava", "max_position_embeddings": 5, "text_config": {}},
        {"model_type": "llava", "max_position_embeddings": 5, "text_config": {"max_position_embeddings": 6}},
        {"text_config": {"max_position_embeddings": 5}, "vision_config": {"max_position_embeddings": 6}},
        {"text_config": {}, "vision_config": {"max_position_embeddings": 6}},
        {"text_config": {"max_position_embeddings": 5}, "decoder": {}},
        {"encoder": {}, "decoder": {"max_position_embeddings": 5}},
        {"thinker_config": {"text_config": {"max_position_embeddings": 5}}},
    ],
)
def test_what_is_in_doubt_is_left_to_transformers(content: dict[str, Any]) -> None:
    assert plain_limit(content) is None
