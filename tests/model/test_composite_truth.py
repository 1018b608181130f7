"""Models that read images or sound too: their texts are those of the whole model, of which the language model alone is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForMultimodalLM

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.guard.support import check_config, check_replica
from kvpool.worker_service.model.guard.tiny_replica import replica_config
from scripts.models.subjects import COMPOSITE, default_config
from scripts.models.trial import FIRST_PLAIN, save
from tests.model.paged import PagedModel, load
from tests.tiny_models import Oracle

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

NUM_NEW = 8
CONV = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4}
# Rotations for images and a text that counts by itself, a text model of another name, recurrent layers, expert weights that are
# stored one by one under other names, a class of the text alone that looks for other names, and a head tied over two levels.
KINDS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "smolvlm": {},
    "lfm2_vl": {"text_config": {"model_type": "lfm2", **CONV}},
    "kimi_k25": {},
    "emu3": {},
    "gemma3": {},
}


def config_of(kind: str) -> Any:
    large = default_config(kind if kind in ("emu3", "gemma3") else f"{COMPOSITE}{kind}")
    if more := KINDS.get(kind):
        large = type(large)(**more)
    return replica_config(large, 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_whole_model_and_nothing_else_is_loaded(kind: str, tmp_path: Path) -> None:
    save(config_of(kind), tmp_path)
    oracle = Oracle.of(tmp_path)
    loaded = load(tmp_path, max_model_len=128)
    prompts = [
        [FIRST_PLAIN + (seed * index * index) % 200 for index in range(length)] for seed, length in ((3, 21), (7, 5))
    ]
    paged = PagedModel(loaded)
    requests = [paged.request(prompt, NUM_NEW) for prompt in prompts]
    paged.run(requests, chunk=7)
    assert [request.token_ids for request in requests] == [oracle.logits(tuple(one), NUM_NEW)[0] for one in prompts]
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path)
    text = {name for name, _ in modules_of(loaded.runtime).named_parameters()}
    assert text < {name for name, _ in whole.named_parameters()}
    assert not any(part in name for name in text for part in ("vis", "image", "projector", "connector", "vq"))


def test_a_text_weight_that_is_missing_is_not_drawn_at_random(tmp_path: Path) -> None:
    save(config_of("qwen2_vl"), tmp_path)
    whole = AutoModelForMultimodalLM.from_pretrained(tmp_path)
    weights = whole.state_dict()
    del weights["model.language_model.layers.1.mlp.up_proj.weight"]
    whole.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path, max_model_len=128)


def test_a_model_with_other_positions_for_its_texts_is_refused() -> None:
    """Kosmos-2.5 begins to count after its padding."""
    large = default_config(f"{COMPOSITE}kosmos-2.5")
    with pytest.raises(ModelError, match="with plain positions"):
        check_replica(large, 4096)


def test_a_class_for_weights_of_other_names_is_not_taken() -> None:
    """transformers loads ShieldGemma 2 with Gemma 3's class too, which finds none of its weights."""
    with pytest.raises(ModelError, match="no causal language model for 'shieldgemma2'"):
        check_config(AutoConfig.for_model("shieldgemma2"), 128)
