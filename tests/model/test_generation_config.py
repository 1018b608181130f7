"""What generation_config.json asks for: each field of transformers is a default, without effect and named, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from transformers import AutoConfig, GenerationConfig

from kvpool.v1 import worker_pb2
from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.generation import (
    FIELDS,
    Use,
    read_generation,
    read_generation_config,
)
from kvpool.worker_service.model.length import choose_max_model_len, plain_limit
from kvpool.worker_service.model.placement import read_config
from kvpool.worker_service.model.source.convert import ending_ids
from scripts.models import document
from tests.tiny_models import ARCHITECTURES

VOCAB_SIZE = 100
ASKS: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3, "encoder_no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8, 9],
    "begin_suppress_tokens": [10], "forced_eos_token_id": 2, "max_new_tokens": 50, "max_length": 60, "min_new_tokens": 4,
    "min_length": 5, "stop_strings": ["end"], "num_beams": 3, "length_penalty": 2.0, "early_stopping": True,
    "typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.5, "encoder_repetition_penalty": 1.5,
    "exponential_decay_length_penalty": [5, 1.5], "sequence_bias": [[[1], 2.0]], "guidance_scale": 1.5,
    "watermarking_config": {}, "token_healing": True, "penalty_alpha": 0.6, "dola_layers": "high", "num_beam_groups": 2,
    "diversity_penalty": 0.5, "constraints": [1], "force_words_ids": [[1]], "renormalize_logits": True,
    "remove_invalid_values": True, "max_time": 3.0, "cache_implementation": "static", "num_return_sequences": 2, "use_mtp": True,
    "prompt_lookup_num_tokens": 3, "low_memory": True, "output_scores": True, "prefill_chunk_size": 4,
}  # fmt: skip
"""For each kind of field a value that asks for something."""


def read(
    folder: Path, generation: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None, **facts: Any
) -> tuple[worker_pb2.ModelFacts, list[str]]:
    (folder / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_generation(
        read_generation_config(folder), folder, **{"vocab_size": VOCAB_SIZE, "end_of_turn": {}, **facts}
    )


def test_every_field_that_transformers_has_is_in_the_table() -> None:
    """A field of a new version is decided on before that version is used."""
    assert set(vars(GenerationConfig())) == set(FIELDS)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.use is Use.DEFAULT])
def test_a_default_is_what_a_request_means_that_does_not_say(name: str, tmp_path: Path) -> None:
    found, lines = read(tmp_path, {name: ASKS[name]})
    options = {entry.name for entry, _ in found.defaults.sampling.ListFields()}
    for part in (found.defaults.stop, found.defaults.beam_search, found.defaults):
        options |= {entry.name for entry, _ in part.ListFields()}
    names = {"do_sample": "temperature", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    if name == "temperature":  # without do_sample generate is greedy
        assert found.defaults == worker_pb2.GenerationDefaults()
        return
    assert names.get(name, name) in options
    assert any("defaults of requests" in line and name in line for line in lines)


def test_tokens_that_are_forced_count_as_new_ones_and_are_none_of_an_answer(tmp_path: Path) -> None:
    found = read(tmp_path, {"max_new_tokens": 50, "min_new_tokens": 4}, num_forced=1)[0].defaults.stop
    assert (found.max_tokens, found.min_tokens) == (49, 3)
    least = read(tmp_path, {"max_new_tokens": 1, "min_new_tokens": 1}, num_forced=1)[0].defaults.stop
    assert (least.max_tokens, least.min_tokens) == (1, 0)


@pytest.mark.parametrize(
    "name", [name for name, field in FIELDS.items() if field.use in (Use.REFUSED, Use.WHILE_SAMPLING)]
)
def test_what_texts_depend_on_and_is_not_carried_out_is_refused_by_name(name: str, tmp_path: Path) -> None:
    sampled = {"do_sample": True} if FIELDS[name].use is Use.WHILE_SAMPLING else {}
    with pytest.raises(ModelError, match=rf"^generation_config\.json: {name}.*take the field out of the file"):
        read(tmp_path, {name: ASKS[name], **sampled})
    if sampled:
        assert any("without effect" in line and name in line for line in read(tmp_path, {name: ASKS[name]})[1])


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.use is Use.NOTHING and name in ASKS])
def test_what_has_no_effect_is_named(name: str, tmp_path: Path) -> None:
    found, lines = read(tmp_path, {"do_sample": True, name: ASKS[name]})
    assert found.defaults == read(tmp_path, {"do_sample": True})[0].defaults
    assert any("without effect" in line and name in line for line in lines)


def test_values_that_ask_for_nothing_are_taken_and_not_named(tmp_path: Path) -> None:
    usual = GenerationConfig._get_default_generation_params()
    _, lines = read(tmp_path, {name: value for name, value in usual.items() if name not in ("top_k", "max_length")})
    assert not any("without effect" in line for line in lines)
    _, lines = read(tmp_path, {"a_field_of_their_own": 1})
    assert lines[-1].endswith("without effect: a_field_of_their_own")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "warm"), ("temperature", 101), ("top_p", 0), ("top_p", 1.5), ("top_k", -1), ("top_k", 1.5), ("min_p", 2),
        ("repetition_penalty", 0), ("no_repeat_ngram_size", -2), ("suppress_tokens", ["a"]),
        ("bad_words_ids", [1]), ("bad_words_ids", 7), ("forced_eos_token_id", 1.5), ("max_new_tokens", 0), ("max_length", "20"),
        ("min_new_tokens", -1), ("num_beams", 65), ("num_beams", "3"), ("length_penalty", 7), ("early_stopping", "soon"),
        ("eos_token_id", "</s>"), ("eos_token_id", [True]), ("stop_strings", 5),
    ],
)  # fmt: skip
def test_a_value_that_no_request_may_have_is_refused_by_the_fields_name(
    name: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json.*{name}"):
        read(tmp_path, {"do_sample": True, name: value} if name == "temperature" else {name: value})


@pytest.mark.parametrize(
    ("together", "name"),
    [({"renormalize_logits": True, "num_beams": 2}, "renorm"), ({"do_sample": True, "num_beams": 2}, "num_beams")],
)
def test_fields_that_cannot_hold_together_are_refused(together: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=name):
        read(tmp_path, together)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [7, 5]}, {"eos_token_id": 3}, (5, 7)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [3, 4]}}, (3, 4)),
        (None, {"eos_token_id": 3}, (3,)),
        (None, {"model_type": "llama"}, ()),  # the class of such a config has 2
        ({"eos_token_id": -1}, {"eos_token_id": 3}, ()),
        ({"eos_token_id": [2, VOCAB_SIZE]}, {}, (2,)),
    ],
)
def test_the_ids_that_end_a_text_are_the_files_or_else_those_that_config_json_states(
    generation: dict[str, Any] | None, config: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    found, lines = read(tmp_path, generation, config)
    assert tuple(found.eos_token_ids) == ids
    given = [] if generation is None else generation.get("eos_token_id") or []
    is_outside = any(not 0 <= one < VOCAB_SIZE for one in (given if isinstance(given, list) else [given]))
    assert any("outside the vocabulary" in line for line in lines) == is_outside


def test_the_tokenizers_end_of_turn_ends_chats_too_and_is_said(tmp_path: Path) -> None:
    found, lines = read(tmp_path, {"eos_token_id": 2}, end_of_turn={"<|im_end|>": 9, "</s>": 2})
    assert ([*found.eos_token_ids], [*found.end_of_turn_token_ids]) == ([2], [9])
    assert any("in chats" in line and "9 (<|im_end|>)" in line for line in lines)


@pytest.mark.parametrize(
    ("stated", "ids"), [({"eos": 0, "eot": 2}, [0, 2]), ({"eot": 2}, [2]), ({"eos": 1}, [1]), ({}, None)]
)
def test_a_gguf_file_ends_texts_at_the_end_of_a_turn_too(
    stated: dict[str, int], ids: list[int] | None, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, token_id in stated.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert ending_ids(GGUFReader(tmp_path / "m.gguf"), None) == ids


def test_ids_outside_the_vocabulary_are_left_out_of_rules(tmp_path: Path) -> None:
    """No token has them; of a run with such an id no other part is banned."""
    found, _ = read(tmp_path, {"suppress_tokens": [-1, 5, 400], "bad_words_ids": [[5, 400], [6]]})
    assert list(found.defaults.sampling.suppress_tokens.ids) == [5]
    assert [list(one.ids) for one in found.defaults.sampling.bad_words_ids.lists] == [[6]]


def test_without_the_file_config_json_says_it(tmp_path: Path) -> None:
    found, _ = read(tmp_path, None, {"num_beams": 4, "no_repeat_ngram_size": 3, "model_type": "bart"})
    assert (found.defaults.beam_search.num_beams, found.defaults.sampling.no_repeat_ngram_size) == (4, 3)


def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"transformers cannot read .*generation_config\.json"):
        read_generation_config(tmp_path)


def test_the_document_has_the_table() -> None:
    """`make prove KIND=models` writes it; a change of the table alone is in docs/MODELS.md too."""
    assert document.generation() in document.PATH.read_text(encoding="utf-8")


# -- the longest sequence by config.json alone: equal to what transformers makes of the file, or left to transformers


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
