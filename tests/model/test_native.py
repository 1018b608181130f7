"""Which models run natively, what becomes of the others, and the bits of those that do."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.forward.kv_cache import KVCache
from kvpool.worker_service.model.forward.kv_plan import KVCachePlan
from kvpool.worker_service.model.forward.modules import ModulesRuntime
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.forward.runner import ModelRunner
from kvpool.worker_service.model.guard.self_check import relative_difference
from kvpool.worker_service.model.guard.tiny_replica import replica_config
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.native import check
from kvpool.worker_service.model.native import load as native_load
from kvpool.worker_service.model.settings import DTypeName, QuantizationName
from kvpool.worker_service.native.cpu import selection
from kvpool.worker_service.step import SequencePart, Step
from scripts.models.subjects import default_config
from scripts.models.trial import save
from tests.model.paged import GREEDY, load, loaded_models, next_token
from tests.model.truth.dense import NATIVE_ARCHITECTURES
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.native

CPU = torch.device("cpu")
LENGTH = 400
"""More than a partition of keys, so that partitions are folded and shared."""
TEXT = random.Random(1).choices(range(250), k=LENGTH)
_REASONS = {
    "mixtral": "its layers have weights other than those of linear layers and norms, such as mlp.gate.weight",
    "gpt_oss": "it has attention sinks",
    "deepseek_v3": "heads of K and V differ in size",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama")).path


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - NATIVE_ARCHITECTURES))
def test_what_is_not_native_is_refused_with_the_reason_or_runs_on_torch(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path)
    with pytest.raises(
        ModelError, match=f"--runtime native cannot serve this model here: .*{_REASONS.get(architecture, '')}"
    ):
        load(tiny.path, runtime="native")


def served_by_torch(path: Path, why: str, **settings: Any) -> LoadedModel:
    """`--runtime auto` says why it takes torch."""
    lines: list[str] = []
    loaded = load(path, lines.append, runtime="auto", **settings)
    assert isinstance(loaded.runtime, ModulesRuntime)
    assert any(line.startswith(f"runtime: torch; not native: {why}") for line in lines), lines
    return loaded


def test_a_model_that_fails_the_check_is_loaded_again_for_torch(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are gone from the modules by then."""
    monkeypatch.setattr(check, "_TOLERANCE", {torch.float32: 1e-4, torch.bfloat16: 0.0})
    next_token(served_by_torch(llama, "its logits differ", dtype="bfloat16"), TEXT[:5])


@pytest.mark.parametrize("num_calls", [1, 2], ids=["its replica", "itself"])
def test_a_model_that_surprises_is_served_by_torch(
    num_calls: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, num_checked = loaded_models(monkeypatch), itertools.count(1)

    def surprised(*arguments: Any) -> None:
        if next(num_checked) == num_calls:
            raise KeyError("inv_freq")
        check.check(*arguments)

    monkeypatch.setattr(native_load, "check", surprised)
    next_token(served_by_torch(llama, "KeyError: 'inv_freq'"), TEXT[:5])
    assert len(models) == num_calls


def test_the_text_model_of_a_composite_one_runs_natively(tmp_path: Path) -> None:
    """Its own config describes the text only, of which transformers can build no model."""
    save(replica_config(default_config("emu3"), 128), tmp_path)
    assert isinstance(load(tmp_path, max_model_len=128, runtime="native").runtime, NativeRuntime)


def test_where_the_step_was_not_built_torch_serves_and_says_what_to_do(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(selection, "BUILDS", tmp_path)
    what_to_do = "install kvpool again, with a C compiler; in a clone, any `make` command compiles it."
    served_by_torch(llama, f"The native step was not built: {what_to_do}", cache_dir=tmp_path)


def test_weights_are_held_once(llama: Path) -> None:
    """In the native layout: the modules are empty, and nothing else has a copy."""
    lines: list[str] = []
    native = load(llama, lines.append, runtime="native")
    torch_bytes = load(llama).runtime.num_bytes()
    assert isinstance(native.runtime, NativeRuntime)
    # Vectors are filled up with zeros, and there are tables of cos and sin.
    tables = 2 * 512 * 4 * 4
    assert native.runtime.num_bytes() <= 1.1 * torch_bytes + tables
    assert [line for line in lines if line.startswith("runtime: native (")]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_int8_is_the_model_with_rounded_weights_and_activations(architecture: str, tmp_path: Path) -> None:
    """A weight to 127 steps up to the largest of its output, an activation to 127 up to the largest of its group of 64."""
    path = make_tiny_model(architecture, tmp_path).path
    rounded = _load(path)
    for module in rounded.modules():
        if type(module) in (torch.nn.Linear, Conv1D):
            axis = 1 if type(module) is torch.nn.Linear else 0
            module.weight = torch.nn.Parameter(_rounded(module.weight, axis), requires_grad=False)
            module.register_forward_pre_hook(lambda _, inputs: (_rounded_in_groups(inputs[0]),))
    tokens = TEXT[:60]
    with torch.inference_mode():
        wanted, exact = (model(torch.tensor([tokens])).logits[0] for model in (rounded, _load(path)))
    runner = load(path, runtime="native", quantize="int8").runner(KVCachePlan.one_group(5, 16, 1))
    found = runner.logits([SequencePart(tokens, 0, ([1, 2, 3, 4],), None)])
    assert relative_difference(found, wanted) < 0.2 * relative_difference(exact, wanted)


def _load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _rounded(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    steps = numbers.detach().abs().amax(axis, keepdim=True) / 127
    return (numbers / steps).round() * steps


def _rounded_in_groups(inputs: torch.Tensor) -> torch.Tensor:
    return torch.cat([_rounded(group, -1).nan_to_num(0) for group in torch.split(inputs, 64, -1)], -1)


def test_int8_halves_the_weights_and_is_another_model(llama: Path) -> None:
    """KV of both must never mix, so they have two fingerprints."""
    lines: list[str] = []
    how: dict[str, Any] = {"dtype": "bfloat16", "runtime": "native"}
    exact, rounded = load(llama, **how), load(llama, lines.append, **how, quantize="int8")
    assert rounded.facts.model_fingerprint != exact.facts.model_fingerprint
    assert rounded.runtime.num_bytes() < 0.75 * exact.runtime.num_bytes()  # the embedding keeps its type
    assert [line for line in lines if line.startswith("runtime: native (") and "weights of int8" in line]


def test_int8_is_refused_where_the_native_step_cannot_run(tmp_path: Path) -> None:
    path = make_tiny_model("gpt_oss", tmp_path).path
    with pytest.raises(ModelError, match=r"--quantize int8 needs the native step, .* it has attention sinks. Leave"):
        load(path, runtime="auto", quantize="int8")
    with pytest.raises(ModelError, match=r"--quantize int8 needs the native step, .* would compute float16 on cpu"):
        load(path, dtype="float16", runtime="auto", quantize="int8")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_row_without_numbers_ends_its_request_alone(llama: Path, quantize: QuantizationName) -> None:
    runner = load(llama, runtime="native", quantize=quantize).runner(KVCachePlan.one_group(8, 16, 1))
    good = SequencePart(TEXT[:9], 0, ([1],), GREEDY)
    (expected,) = runner.execute(Step([good]))
    runner.execute(Step([SequencePart(TEXT[:9], 0, ([2],), None)]))
    for layer in runner.kv_cache.layers:  # as a model with an overflow would leave it
        layer.k_cache[2] = float("nan")
    spoilt = SequencePart(TEXT[9:10], 9, ([2],), GREEDY)
    found = runner.execute(Step([spoilt, good._replace(block_tables=([3],))]))
    assert found[0].bad_logits is not None
    assert found[1] == expected


class Subject:
    """A model whose bits are tried."""

    def __init__(self, path: Path, dtype: DTypeName, quantize: QuantizationName) -> None:
        loaded = load(path, dtype=dtype, runtime="native", quantize=quantize)
        assert isinstance(loaded.runtime, NativeRuntime)
        self.loaded, self.runtime = loaded, loaded.runtime
        runner, tables = self.runner(num_threads=1, block_size=16, num_tables=1, seed=0)
        self.truth = runner.logits([SequencePart(TEXT, 0, (tables[0],), None)])
        runner.close()

    def runner(
        self, num_threads: int, block_size: int, num_tables: int, seed: int
    ) -> tuple[ModelRunner, list[list[int]]]:
        """Over a cache that is NaN, with tables of scattered blocks for texts of LENGTH."""
        each = -(-LENGTH // block_size)
        cache = KVCache(
            KVCachePlan.one_group(1 + num_tables * each, block_size, 1),
            self.loaded.runtime.layers,
            self.loaded.runtime.dtype,
            CPU,
        )
        cache.fill(float("nan"))
        blocks = list(range(1, 1 + num_tables * each))
        random.Random(seed).shuffle(blocks)
        runtime = dataclasses.replace(self.runtime, num_threads=num_threads)
        return ModelRunner(runtime, cache, None), [blocks[i * each : (i + 1) * each] for i in range(num_tables)]

    def same(self, rows: torch.Tensor, first: int) -> bool:
        return torch.equal(rows, self.truth[first : first + len(rows)])


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "float32", "none"),
        ("llama", "bfloat16", "none"),
        ("llama", "bfloat16", "int8"),
        ("gemma2", "float32", "none"),
        ("gemma2", "bfloat16", "none"),
        ("olmo2", "float32", "none"),
        ("gpt_neox", "bfloat16", "int8"),
    ],
    ids=lambda param: "-".join(param),
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Full attention; windows with soft caps; norms of all heads together; attention and the MLP added at once."""
    architecture, *types = request.param
    return Subject(make_tiny_model(architecture, tmp_path_factory.mktemp(architecture)).path, *types)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(num_threads=2, block_size=16, cuts=[300], neighbours=[9], num_sharers=4, seed=1)
@given(
    num_threads=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([4, 16, 32]),
    cuts=st.sets(st.integers(1, LENGTH - 4), max_size=5).map(sorted),  # between chunks
    neighbours=st.lists(st.integers(1, 40), max_size=4),  # lengths of the texts in the same steps
    num_sharers=st.integers(0, 4),  # texts with the same leading blocks, in the last step
    seed=st.integers(0, 1 << 16),  # of the order of parts and of block ids
)
def test_a_text_has_the_same_bits_in_every_step(
    subject: Subject,
    num_threads: int,
    block_size: int,
    cuts: list[int],
    neighbours: list[int],
    num_sharers: int,
    seed: int,
) -> None:
    """In chunks, packed in any order with others, decoded, shared, over any blocks, by any number of threads."""
    numbers = random.Random(seed)
    runner, tables = subject.runner(num_threads, block_size, 2 + len(neighbours) + num_sharers, seed)
    own, others = tables[0], tables[1:]
    try:
        ends = [*cuts, LENGTH - 3, LENGTH - 2, LENGTH - 1, LENGTH]
        for first, end in zip([0, *ends], ends, strict=False):
            parts = [SequencePart(TEXT[first:end], first, (own,), None)]
            for length, table in zip(neighbours, others, strict=False):
                parts.append(SequencePart(numbers.choices(range(VOCAB_SIZE), k=length), 0, (table,), None))
            numbers.shuffle(parts)
            rows = torch.split(runner.logits(parts), [len(part.token_ids) for part in parts])
            place = next(index for index, part in enumerate(parts) if part.block_tables[0] is own)
            assert subject.same(rows[place], first)
        num_shared = (LENGTH - 1) // block_size
        start = num_shared * block_size
        # Of different lengths: who reads behind what is shared through the table of another one finds NaN.
        sharers = [
            SequencePart(TEXT[start : start + 1 + index % 3], start, ([*own[:num_shared], *table[num_shared:]],), None)
            for index, table in enumerate(others[len(neighbours) :])
        ]
        if sharers:
            for logits in torch.split(runner.logits(sharers), [len(part.token_ids) for part in sharers]):
                assert subject.same(logits, start)
            results = runner.execute(Step([part._replace(sampling=GREEDY) for part in sharers]))
            for part, result in zip(sharers, results, strict=True):
                assert result.token is not None
                assert result.token.token_id == int(subject.truth[start + len(part.token_ids) - 1].argmax())
    finally:
        runner.close()
