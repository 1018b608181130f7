"""What a model needs, told without its weights, is what it needs with them; the maximum batch, and what is measured of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvpool.worker_service.model.errors import ModelError, UnsupportedModel
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.memory.profile import CUDAMeter, MaximumBatches, largest_that_fits, measure_batch
from kvpool.worker_service.model.settings import MemorySettings
from kvpool.worker_service.step import SequencePart, Step
from tests.model.paged import load, recorded_steps
from tests.tiny_models import MAX_MODEL_LEN, build_model, make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_an_architecture_runs_without_values(architecture: str) -> None:
    """Activations grow with the tokens, and never without bound."""
    model = build_model(architecture, 0)
    meta_model = build_meta_model(model.config)
    assert meta_model.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    few, many = (meta_model.activation_bytes(torch.bfloat16, tokens, 4) for tokens in (512, 4096))
    assert 7 * few < many < 9 * few
    assert all(parameter.device.type == "meta" for parameter in meta_model.model.parameters())


def test_activations_of_one_layer_by_hand() -> None:
    """What is alive at once in an MLP: its input twice (it is added again), gate, its activation, up."""
    config = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=32, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=4
    )
    meta_model = build_meta_model(config)
    tokens = 1000
    by_hand = tokens * 2 * 3 * 4096
    assert by_hand <= meta_model.activation_bytes(torch.bfloat16, tokens, 1) <= by_hand + tokens * 2 * 32 * 20


def test_logits_are_counted_with_what_sampling_makes_of_them() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=100_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    meta_model = build_meta_model(config)
    assert meta_model.activation_bytes(torch.bfloat16, 64, 64) >= 64 * 100_000 * (2 + 8 + 4 + 4)


def test_a_model_that_cannot_be_drawn_is_an_error_that_says_so() -> None:
    with pytest.raises(UnsupportedModel, match="The needs of bert are unknown"):
        build_meta_model(AutoConfig.for_model("bert", hidden_size=8, num_attention_heads=3))


# -- the maximum batch


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny_model("llama", tmp_path_factory.mktemp("llama")).path)


class FakeMeter(CUDAMeter):
    """Says that the newest step needed 1,000 bytes per token, and of a step of decodes 3 bytes per token read."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self._num_seen = 0
        self.num_released = 0

    def reset(self) -> None:
        self._num_seen = len(self._steps)

    def _step(self) -> Step:
        assert len(self._steps) == self._num_seen + 1, "one step between reset and reading"
        return self._steps[-1]

    def reserved_bytes(self) -> int:
        return 1000 * sum(len(part.token_ids) for part in self._step().parts)

    def allocated_bytes(self) -> int:
        return 77 + 3 * sum(part.start for part in self._step().parts)

    def release(self) -> None:
        self.num_released += 1


def written(part: SequencePart, block_size: int) -> list[int]:
    """Blocks that a part writes."""
    end = part.start + len(part.token_ids)
    return part.block_tables[0][part.start // block_size : -(-end // block_size)]


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_model_len", "block_size"),
    [(2048, 64, 8192, 16), (100, 7, 30, 4), (5, 5, 1000, 256), (64, 1, 10, 1), (300, 3, 2, 16), (4096, 4096, 999, 256)],
)
def test_a_maximum_batch_is_as_large_as_the_engine_makes_them(
    num_tokens: int, num_seqs: int, max_model_len: int, block_size: int
) -> None:
    batches = MaximumBatches(num_tokens, num_seqs, max_model_len, block_size, bytes_per_token=1)
    prompts, late, decodes = batches.prompts(), batches.late_chunk(), batches.decodes(batches.decode_context)
    assert len(prompts.parts) == len(decodes.parts) == num_seqs
    assert sum(len(part.token_ids) for part in prompts.parts) == min(num_tokens, num_seqs * max_model_len)
    assert late.parts[0].start + len(late.parts[0].token_ids) == max_model_len
    told = batches.prompt_with_logprobs()
    rows = told.parts[0].prompt_rows
    assert (0 if rows is None else len(rows.targets)) == min(num_tokens, max_model_len) - 1
    assert (decodes.parts[0].start > 0) == (max_model_len > block_size)
    for step in (prompts, late, told, decodes):
        assert all(part.sampling is not None for part in step.parts)
        assert all(part.start + len(part.token_ids) <= max_model_len for part in step.parts)
        own = [block for part in step.parts for block in written(part, block_size)]
        assert len(set(own)) == len(own)
        assert min(own) >= 2
        assert max(own) < batches.num_blocks


def test_what_was_measured_becomes_bytes_per_batch_and_per_token_read(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = recorded_steps(monkeypatch)
    meter = FakeMeter(steps)
    settings = MemorySettings(16, max_num_seqs=4, max_num_batched_tokens=200)
    needs = measure_batch(loaded.runner, meter, settings, MAX_MODEL_LEN, bytes_per_token=1)
    assert needs == (200_000, 3)
    assert meter.num_released
    assert [len(step.parts) for step in steps] == [4, 1, 1, 4, 4]
    runner = loaded.runner(KVCachePlan.one_group(4, 16, 1))  # the model is free again
    assert runner.logits([SequencePart([1, 2, 3], 0, ([1],), None)]).isfinite().all()
    runner.close()


@pytest.mark.parametrize("fitting", [150, 3])
def test_a_batch_that_does_not_fit_names_one_that_does(
    loaded: LoadedModel, fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = recorded_steps(monkeypatch, fitting)
    settings = MemorySettings(16, max_num_seqs=4, max_num_batched_tokens=500)
    with pytest.raises(ModelError, match=r"500 tokens and 4 sequences does not fit|smaller --max-num-seqs") as caught:
        measure_batch(loaded.runner, FakeMeter(steps), settings, MAX_MODEL_LEN, bytes_per_token=1)
    if fitting > 4:
        named = int(str(caught.value).split("--max-num-batched-tokens ")[1].split()[0])
        assert fitting - 64 <= named <= fitting
    else:
        assert "smaller --max-num-seqs" in str(caught.value)


@pytest.mark.parametrize("limit", [0, 9, 10, 11, 500, 998, 999, 5000])
def test_the_search_ends_close_below_the_limit(limit: int) -> None:
    found = largest_that_fits(lambda number: number <= limit, 10, 1000)
    if limit < 10:
        assert found is None
    else:
        assert found is not None
        assert found <= limit
        assert min(limit, 999) - found <= 64


@pytest.mark.gpu
def test_the_meter_of_a_gpu_sees_what_is_allocated() -> None:
    meter = CUDAMeter(torch.device("cuda", 0))
    kept = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
    meter.reset()
    temporary = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
    del temporary
    assert 64 << 20 <= meter.allocated_bytes() < 70 << 20
    assert meter.reserved_bytes() >= 64 << 20
    assert kept.numel() == 1 << 20


@pytest.mark.gpu
def test_a_plan_on_a_gpu_can_be_allocated_and_a_maximum_batch_runs_in_it(tmp_path: Path) -> None:
    loaded = load(make_tiny_model("llama", tmp_path).path, device="cuda:0")
    settings = MemorySettings(16, gpu_memory_utilization=0.5, max_num_seqs=8, max_num_batched_tokens=256)
    budget = loaded.plan(settings)
    runner = loaded.runner(budget.kv_cache)
    batches = MaximumBatches(256, 8, MAX_MODEL_LEN, 16, bytes_per_token=1)
    for step in (batches.prompts(), batches.late_chunk(), batches.decodes(batches.decode_context)):
        runner.execute(step)
    free, total = torch.cuda.mem_get_info(0)
    assert total - free <= 0.55 * total
    runner.close()
