"""docs/MODELS.md, and the script that writes it: a handful of its types tried again; models that read images or sound too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForMultimodalLM

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.forward.layers import PagedTarget
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.guard.support import check_config, check_replica
from kvpool.worker_service.model.guard.tiny_replica import replica_config
from scripts.models import document, seq2seq_trial, trial
from scripts.models.outcome import Outcome, Result
from scripts.models.published import PUBLISHED
from scripts.models.subjects import (
    COMPOSITE,
    SEQ2SEQ,
    all_composite_types,
    all_published,
    all_seq2seq_types,
    all_types,
    default_config,
)
from scripts.models.trial import FIRST_PLAIN, save
from tests.model.paged import PagedModel, load
from tests.tiny_models import Oracle

# Latent attention twice a layer, learned positions, code of its own, states in the cache, on the module, and in a cache of the
# model's own. Models that test_truth.py has run there.
HANDFUL = ("longcat_flash", "opt", "bloom", "lfm2", "recurrent_gemma", "minimax")
# Experts with a capacity, padding that counts, an encoder that changes with its inputs, attention over text and encoder at once,
# code of its own, speech.
SEQ2SEQ_HANDFUL = (
    "switch_transformers",
    "nllb-moe",
    "bigbird_pegasus",
    "t5gemma2",
    "prophetnet",
    "whisper",
)


LEAST_RUNNING = (136, 19, 48, 58)
"""Of each part of the document."""


@pytest.fixture(autouse=True)
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, which for a while are next to decodes; `make prove KIND=models` tries the other ways too."""
    for module in (trial, seq2seq_trial):
        monkeypatch.setattr(module, "WAYS", ((7, 0),))


@pytest.fixture(scope="module")
def summary() -> document.Summary:
    return document.read(document.PATH.read_text(encoding="utf-8"))


def test_the_document_is_of_the_installed_transformers(summary: document.Summary) -> None:
    """Each of its types is in the table, once; `make prove KIND=models` writes it anew."""
    assert summary.transformers == transformers.__version__
    assert sorted(summary.causal.table) == all_types()
    assert sorted(f"{SEQ2SEQ}{kind}" for kind in summary.seq2seq.table) == all_seq2seq_types()
    assert sorted(f"{COMPOSITE}{kind}" for kind in summary.composite.table) == all_composite_types()
    assert sorted(f"{PUBLISHED}{name}" for name in summary.published.table) == sorted(all_published())


def test_none_is_silently_wrong_and_most_run(summary: document.Summary) -> None:
    parts = (summary.causal, summary.seq2seq, summary.composite, summary.published)
    for part, least in zip(parts, LEAST_RUNNING, strict=True):
        results = list(part.table.values())
        assert part.counts == {result.value: results.count(result.value) for result in Result}
        assert part.counts[Result.WRONG.value] == 0
        assert part.counts[Result.RUNS.value] >= least


@pytest.mark.parametrize("kind", [*HANDFUL, *(f"{SEQ2SEQ}{kind}" for kind in SEQ2SEQ_HANDFUL)])
def test_a_type_does_what_the_document_says(kind: str, summary: document.Summary, tmp_path: Path) -> None:
    outcome = trial.try_type(kind, tmp_path)
    part = summary.seq2seq if kind.startswith(SEQ2SEQ) else summary.causal
    assert outcome.result.value == part.table[kind.removeprefix(SEQ2SEQ)], outcome.reason
    assert outcome.reason or outcome.result is Result.RUNS


def test_a_model_that_is_taken_and_differs_is_called_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not the guard's: with the guard's own blinded, it still sees attention that is a little off."""
    attend = PagedTarget.__call__

    def a_little_off(self: PagedTarget, module: torch.nn.Module, *arguments: Any) -> torch.Tensor:
        query, key, value, call = arguments
        return attend(self, module, query, key, value, call._replace(scaling=call.scaling * 1.1))

    monkeypatch.setattr(PagedTarget, "__call__", a_little_off)
    kinds = ("llama", f"{SEQ2SEQ}bart")
    for kind in kinds:
        assert trial.try_type(kind, tmp_path / f"refused-{kind}").result is Result.REFUSED
    monkeypatch.setattr("kvpool.worker_service.model.guard.self_check._TOLERANCE", {torch.float32: 1e9})
    for kind in kinds:
        assert trial.try_type(kind, tmp_path / kind).result is Result.WRONG


def test_what_is_written_can_be_read() -> None:
    outcomes = [
        Outcome("b", Result.REFUSED, "b has | in it"),
        Outcome("c", Result.NOT_BUILT, "ImportError: of\nmany lines"),
        Outcome(f"{SEQ2SEQ}b", Result.RUNS),
        Outcome(f"{COMPOSITE}d", Result.REFUSED, "it sees"),
        Outcome(f"{PUBLISHED}Model 1.5 7B", Result.RUNS),
    ]
    read = document.read(document.render(outcomes, 1e-3))
    assert read.causal.counts == {"runs": 0, "refused": 1, "not built here": 1, "WRONG": 0}
    tables = [part.table for part in (read.causal, read.seq2seq, read.composite, read.published)]
    assert tables == [
        {"b": "refused", "c": "not built here"},
        {"b": "runs"},
        {"d": "refused"},
        {"Model 1.5 7B": "runs"},
    ]
    with pytest.raises(ValueError, match="no line of versions"):
        document.read("# Which models run")


# -- models that read images or sound: their texts are those of the whole model, of which the language model alone is loaded


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
    large = default_config(f"{COMPOSITE}kosmos-2.5")
    with pytest.raises(ModelError, match="with plain positions"):
        check_replica(large, 4096)


def test_a_class_for_weights_of_other_names_is_not_taken() -> None:
    """transformers loads ShieldGemma 2 with Gemma 3's class too, which finds none of its weights."""
    with pytest.raises(ModelError, match="no causal language model for 'shieldgemma2'"):
        check_config(AutoConfig.for_model("shieldgemma2"), 128)
