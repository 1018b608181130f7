"""Loading encoder-decoder models: what is said, what is refused, and what a worker needs to know of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from kvpool.worker_service.engine.prompt import EncoderSettings
from kvpool.worker_service.engine.step import EncoderBlocks, SequencePart, Step
from kvpool.worker_service.model.errors import ModelError, UnsupportedModel
from kvpool.worker_service.model.facts import read_encoder_settings
from kvpool.worker_service.model.guard.support import check_config, check_replica
from kvpool.worker_service.model.guard.tiny_replica import replica_config
from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import ModelSettings
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.model.paged import GREEDY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")


def make(kind: str, folder: Path) -> Path:
    save(replica_config(default_seq2seq_config(kind), 1 << 20), folder)
    return folder


def settings(folder: Path, **more: Any) -> ModelSettings:
    return ModelSettings(str(folder), device="cpu", cache_dir=folder / "cache", num_threads=1, **more)


def test_the_facts_say_that_the_prompt_feeds_an_encoder(tmp_path: Path) -> None:
    lines: list[str] = []
    facts = load_model(settings(make("t5", tmp_path), dtype="float32", max_model_len=100), lines.append).facts
    assert facts.encoder == EncoderSettings(512, 264, (0,))
    assert facts.max_model_len == 100
    assert "runtime: torch; not native: it computes no encoder-decoder models" in lines
    shorter = load_model(settings(tmp_path, dtype="float32", max_encoder_tokens=40), lines.append).facts.encoder
    assert shorter is not None
    assert shorter.max_tokens == 40


def test_decoders_begin_as_transformers_begins_them() -> None:
    config = AutoConfig.for_model("bart", decoder_start_token_id=5, bos_token_id=6, forced_bos_token_id=None)
    generation = GenerationConfig(decoder_start_token_id=7, forced_bos_token_id=9)
    assert read_encoder_settings(None, config, 10, 20) == EncoderSettings(10, 20, (5,))
    found = read_encoder_settings(generation, config, 10, 20)
    assert found == EncoderSettings(10, 20, (7, 9))
    assert read_encoder_settings(GenerationConfig(bos_token_id=3), AutoConfig.for_model("t5"), 1, 1).decoder_prompt == (
        3,
    )
    with pytest.raises(ModelError, match="has a decoder_start_token_id"):
        read_encoder_settings(None, AutoConfig.for_model("t5"), 10, 20)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"runtime": "native"}, "--runtime native cannot serve this model here: it computes no encoder-decoder models"),
        ({"quantize": "int8"}, "--quantize int8 needs the native step"),
        ({"max_encoder_tokens": 129}, "--max-encoder-tokens 129 is not within 1 … 128"),
    ],
)
def test_what_an_encoder_decoder_model_cannot_have_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(settings(make("bart", tmp_path), dtype="float32", **more), lambda _: None)


def test_a_limit_of_the_encoder_needs_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="has no encoder: leave out --max-encoder-tokens"):
        load_model(settings(tmp_path, max_encoder_tokens=5), lambda _: None)


@pytest.mark.parametrize("kind", ["t5", "t5gemma", "m2m_100"])
def test_a_model_in_bfloat16_passes_its_check_and_runs(kind: str, tmp_path: Path) -> None:
    loaded = load_model(settings(make(kind, tmp_path), dtype="bfloat16", block_size=4), lambda _: None)
    backend = loaded.attention_backend("auto", 4, lambda _: None)
    assert loaded.facts.encoder is not None
    runner = loaded.runner(loaded.plan(MemorySettings(4, num_blocks=20, max_num_seqs=2)).kv_cache, backend)
    runner.kv_cache.fill(float("nan"))
    encoder = EncoderBlocks([3, 1], 7, [20, 30, 40, 50, 60, 70, 80])
    tables = tuple([2 + index, 9, 8] for index in range(len(runner.kv_cache.plan.groups)))
    for start, given in ((0, [*loaded.facts.encoder.decoder_prompt, 33, 44]), (3, [55])):
        part = SequencePart(given, start, tables, GREEDY, encoder=encoder)
        (result,) = runner.execute(Step([part]))
        assert result.bad_logits is None
        assert result.token is not None
        encoder = encoder._replace(token_ids=())


def test_an_encoder_that_changes_with_its_inputs_is_refused() -> None:
    """After a short input it attends to everything for good, and then answers long ones in another way."""
    config = default_seq2seq_config("bigbird_pegasus")
    check_config(config, 4096)
    with pytest.raises(UnsupportedModel, match="another way after it has seen a shorter one") as refusal:
        check_replica(config, 4096)
    assert "--max-model-len" not in str(refusal.value)
    config.attention_type = "original_full"
    check_replica(config, 4096)


def test_attention_in_code_of_its_own_is_refused_by_the_config() -> None:
    with pytest.raises(UnsupportedModel, match="its own code"):
        check_config(default_seq2seq_config("led"), 1024)


def test_a_step_leaves_the_attention_of_the_encoder_as_it_was(tmp_path: Path) -> None:
    """Encoder and decoder of BART have one config: the encoder's own attention must not become the decoder's."""
    loaded = load_model(settings(make("bart", tmp_path), dtype="float32", block_size=4), lambda _: None)
    runner = loaded.runner(loaded.plan(MemorySettings(4, num_blocks=20, max_num_seqs=1)).kv_cache)
    part = SequencePart([2, 7], 0, ([1],), GREEDY, encoder=EncoderBlocks([1], 3, [5, 6, 7]))
    before = loaded.runtime.config._attn_implementation
    first = runner.execute(Step([part]))
    assert loaded.runtime.config._attn_implementation == before == "kvpool"
    again = runner.execute(Step([part._replace(encoder=EncoderBlocks([1], 3))]))
    assert first == again
    with pytest.raises(IndexError):
        runner.execute(Step([part._replace(encoder=EncoderBlocks([1], 3, [5, 9999, 7]))]))
    assert loaded.runtime.config._attn_implementation == "kvpool"
    assert runner.execute(Step([part])) == first
    assert torch.isfinite(torch.tensor([first[0].token.logprobs.logprob])).all()  # type: ignore[union-attr]
