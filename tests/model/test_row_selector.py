"""Logits are computed of the rows that are wanted and of no others, whatever a model does behind its head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import PromptRows, SequencePart, Step
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.forward.modules import RowSelector, modules_of
from tests.model.paged import PagedModel, load
from tests.tiny_models import make_tiny_model


class ScalingModel(torch.nn.Module):
    """A language model whose forward knows no logits_to_keep and scales behind its head."""

    def __init__(self, *, calls: int = 1, shape: tuple[int, ...] = (1, -1, 4)) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 6)
        self._calls = calls
        self._shape = shape
        self.rows_seen = 0

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, hidden: torch.Tensor) -> Any:
        logits = hidden[..., :1]
        for _ in range(self._calls):
            logits = self.head(hidden.view(self._shape))
        self.rows_seen = logits.shape[1]
        return SimpleNamespace(logits=logits * 2)


def test_rows_are_selected_before_the_head_and_what_comes_behind_it_is_done() -> None:
    """Others that run the model, before or after, get all rows."""
    model, hidden = ScalingModel(), torch.randn(1, 5, 4)
    everything = model(hidden).logits
    selector = RowSelector(model)
    with torch.inference_mode():
        for rows in ([4, 1], [], [2, 2, 0]):
            chosen = selector.run(torch.tensor(rows, dtype=torch.int64), hidden=hidden).logits
            assert model.rows_seen == len(rows)
            torch.testing.assert_close(chosen, everything[0, rows])
        assert model(hidden).logits.shape[1] == 5
    selector.close()
    assert not model.head._forward_pre_hooks


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_tells_whether_it_is_numbers_also_those_not_selected(bad: float, dtype: torch.dtype) -> None:
    """The largest numbers of the dtype are numbers."""
    hidden = torch.randn(1, 5, 4).to(dtype)
    hidden[0, 0] = 60_000
    hidden[0, 3, 2] = bad
    selector = RowSelector(ScalingModel().to(dtype))
    with torch.inference_mode():
        for rows in ([4, 1], []):
            selected = selector.run(torch.tensor(rows, dtype=torch.int64), hidden=hidden)
            assert selected.is_finite.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (ScalingModel(calls=0), "0 times"),
        (ScalingModel(calls=2), "2 times"),
        (ScalingModel(shape=(-1, 4)), r"shapes \[\[5, 4\]\]"),
    ],
)
def test_a_model_that_uses_its_head_otherwise_is_refused(model: ScalingModel, complaint: str) -> None:
    """Its rows could not be told apart."""
    with pytest.raises(UnsupportedModel, match=complaint), torch.inference_mode():
        RowSelector(model).run(torch.tensor([4, 1]), hidden=torch.randn(1, 5, 4))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="has no output embeddings"):
        RowSelector(SimpleNamespace(get_output_embeddings=lambda: None))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "gpt_oss"])
def test_no_architecture_computes_logits_that_nobody_wants(architecture: str, tmp_path: Path) -> None:
    """A step of 20 tokens of which one is sampled and three tell of the prompt has four rows of logits; in the middle of a
    prefill there are none; slices are as small as was asked for."""
    loaded = load(make_tiny_model(architecture, tmp_path).path)
    runner = PagedModel(loaded).runner
    runner._max_prompt_rows = 2
    seen: list[int] = []
    head = modules_of(loaded.runtime).get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    greedy = SamplingParams()
    runner.execute(Step([SequencePart([1] * 9, 0, ([1, 2, 3],), None)]))
    assert seen == [0]
    rows = PromptRows(first=4, targets=[5, 6, 7], num_top=0)
    parts = [
        SequencePart([2] * 10, 0, ([4, 5, 6],), greedy),
        SequencePart([3] * 9, 0, ([7, 8, 9],), greedy, prompt_rows=rows),
        SequencePart([4], 9, ([1, 2, 3],), None),
    ]
    results = runner.execute(Step(parts))
    # Sampled and two of the prompt; then the last one of the prompt and, behind it, the token of that sequence.
    assert seen == [0, 3, 2]
    assert [result.token is None for result in results] == [False, False, True]
    assert [len(result.prompt_logprobs) for result in results] == [0, 3, 0]
