"""The memory of encoder-decoder models: the cross group's share, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpool.worker_service.model.errors import KVCacheTooLarge, ModelError
from kvpool.worker_service.model.forward.kv_plan import CrossPlan
from kvpool.worker_service.model.length import choose_max_encoder_tokens, choose_max_model_len
from kvpool.worker_service.model.memory.facts import cross_needs, group_needs, kv_bytes_per_token
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.memory.plan import MemoryBudget, MemoryFacts, MemorySettings, plan_memory
from kvpool.worker_service.model.memory.profile import MaximumBatches
from kvpool.worker_service.model.memory.split import CrossNeeds
from scripts.models.subjects import default_seq2seq_config
from tests.model.paged import PagedModel
from tests.model.truth.encoders import make as make_subject
from tests.model.truth.subject import NUM_NEW

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

GiB = 1 << 30
NEEDS = CrossNeeds(bytes_per_token=1024, max_tokens=500)
EACH = 32
"""Blocks of 16 for an input."""
FACTS = MemoryFacts("cpu", 100 * GiB, 0, 0, 0, bytes_per_token=1024)


def plan(**settings: int | None) -> MemoryBudget:
    return plan_memory(FACTS, replace(MemorySettings(16), **settings), None, NEEDS)  # type: ignore[arg-type]


def test_each_sequence_gets_the_longest_input_and_the_decoder_the_rest() -> None:
    kv_cache = plan(kv_cache_memory=GiB, max_num_seqs=8).kv_cache
    assert kv_cache.cross == CrossPlan(8 * EACH + 1, 1024, 500)
    assert kv_cache.cross_index == 1
    assert kv_cache.groups[0].num_blocks == GiB // (16 * 1024) - (8 * EACH + 1)
    assert kv_cache.total_bytes == GiB


def test_with_less_memory_inputs_take_at_most_half_of_it_but_one_fits() -> None:
    memory = 100 * EACH * 16 * 1024
    cross = plan(kv_cache_memory=memory).kv_cache.cross
    assert cross is not None
    assert cross.num_blocks == 50 * EACH + 1
    least = plan(kv_cache_memory=(EACH + 1 + 5) * 16 * 1024).kv_cache
    assert least.cross is not None
    assert (least.cross.num_blocks, least.groups[0].num_blocks) == (EACH + 1, 5)


def test_a_number_of_blocks_is_that_of_the_decoder() -> None:
    kv_cache = plan(num_blocks=50, max_num_seqs=2).kv_cache
    assert kv_cache.cross is not None
    assert (kv_cache.groups[0].num_blocks, kv_cache.cross.num_blocks) == (50, 2 * EACH + 1)


def test_the_setting_decides() -> None:
    kv_cache = plan(kv_cache_memory=GiB, cross_blocks=77).kv_cache
    assert kv_cache.cross is not None
    assert kv_cache.cross.num_blocks == 77
    with pytest.raises(ModelError, match="has no encoder: leave out --cross-blocks"):
        plan_memory(FACTS, MemorySettings(16, cross_blocks=77))


def test_where_nothing_is_left_for_the_decoder_the_error_says_what_takes_it() -> None:
    with pytest.raises(KVCacheTooLarge, match=r"33 blocks for inputs of 500 tokens.*--max-encoder-tokens"):
        plan(kv_cache_memory=(EACH + 2) * 16 * 1024)
    with pytest.raises(ModelError, match="A KV cache of 1 blocks is too small"):
        plan(num_blocks=5, cross_blocks=1)


def test_the_budget_lists_the_group_and_where_its_size_comes_from() -> None:
    budget = plan(kv_cache_memory=GiB, max_num_seqs=8)
    (line,) = [line for line in budget.lines() if "encoder" in line.what]
    assert (line.what, line.num_bytes) == ("· group 1, encoder's outputs", (8 * EACH + 1) * 16 * 1024)
    assert line.why.endswith("for 8 inputs of 500 tokens")
    assert "group 1 (encoder's outputs)" in budget.kv_cache.describe(100)
    assert "--cross-blocks" in "".join(map(str, plan(kv_cache_memory=GiB, cross_blocks=77).lines()))


@pytest.mark.parametrize("kind", ["t5", "t5gemma"])
def test_a_model_without_weights_needs_what_the_loaded_one_needs(kind: str, tmp_path: Path) -> None:
    loaded = make_subject(kind, tmp_path).loaded
    assert loaded.facts.encoder is not None
    limit = loaded.facts.encoder.max_tokens
    meta_model = build_meta_model(loaded.runtime.config, limit)
    assert cross_needs(meta_model.layers, torch.float32, limit) == cross_needs(loaded.layers, torch.float32, limit)
    assert group_needs(meta_model.layers, torch.float32) == group_needs(loaded.layers, torch.float32)
    assert meta_model.activation_bytes(torch.float32, 64, 8) > 0
    kv_cache = loaded.plan(MemorySettings(16, num_blocks=40)).kv_cache
    cache = loaded.runner(kv_cache).kv_cache
    allocated = sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in cache.layers)
    assert allocated == kv_cache.total_bytes
    assert kv_bytes_per_token(loaded.layers, torch.float32) == kv_cache.bytes_per_token


def test_a_longer_encoder_needs_more_activations() -> None:
    config = default_seq2seq_config("t5")
    short, long = (build_meta_model(config, length).activation_bytes(torch.float32, 8, 8) for length in (16, 4096))
    assert long > 10 * short


def test_a_maximum_batch_runs_the_encoder_on_its_longest_input_once(tmp_path: Path) -> None:
    loaded = make_subject("t5", tmp_path).loaded
    needs = cross_needs(loaded.layers, torch.float32, 100)
    batches = MaximumBatches(64, 4, 128, 16, cross=needs)
    runner = loaded.runner(batches.plan(1, 0))
    steps = [batches.prompts(), batches.late_chunk(), batches.decodes(32)]
    for step in steps:
        results = runner.execute(step)
        assert all(result.token is not None for result in results)
    brought = [[len(part.encoder.token_ids) for part in step.parts if part.encoder is not None] for step in steps]
    assert brought == [[100, 0, 0, 0], [0], [0, 0, 0, 0]]


def test_lengths_come_from_the_config_or_from_the_usual_training() -> None:
    bart, t5 = default_seq2seq_config("bart"), default_seq2seq_config("t5")
    assert (choose_max_model_len(bart, None), choose_max_encoder_tokens(bart, 64)) == (1024, 1024)
    assert (choose_max_model_len(t5, None), choose_max_encoder_tokens(t5, 64)) == (512, 512)
    assert choose_max_encoder_tokens(t5, 2048) == 2048
    assert (choose_max_encoder_tokens(bart, 64, 100), choose_max_encoder_tokens(t5, 64, 9999)) == (100, 9999)
    with pytest.raises(ModelError, match="--max-encoder-tokens 1025 is not within 1 … 1024"):
        choose_max_encoder_tokens(bart, 64, 1025)
    two = default_seq2seq_config("encoder-decoder")
    two.encoder.max_position_embeddings = 300
    assert (choose_max_model_len(two, None), choose_max_encoder_tokens(two, 64)) == (512, 300)


def test_a_worker_plans_and_runs_with_its_own_plan(tmp_path: Path) -> None:
    """Default settings of a worker, on a small cache."""
    subject = make_subject("bart", tmp_path)
    settings = MemorySettings(4, num_blocks=64, max_num_seqs=3)
    kv_cache = subject.loaded.plan(settings).kv_cache
    assert kv_cache.cross is not None
    assert kv_cache.cross.num_blocks == 3 * 32 + 1
    paged = PagedModel(subject.loaded)
    paged.runner = subject.loaded.runner(kv_cache)
    paged._free = list(range(1, 64))
    paged._free_cross = list(range(1, kv_cache.cross.num_blocks))
    request = paged.request(subject.prompts[1], NUM_NEW, encoder=paged.encoder(subject.inputs[1]))
    paged.run([request])
    assert request.token_ids == subject.truths[1].tokens
