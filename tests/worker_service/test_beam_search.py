"""The beam search alone makes the choices of transformers' generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpool.worker_service.engine.beam_search import BeamParams, BeamSearch, EarlyStopping
from kvpool.worker_service.engine.step import BeamCandidate, BeamCandidates

VOCAB_SIZE = 24
NUM_NEW = 9
EARLY_STOPPING = {False: EarlyStopping.ESTIMATE, True: EarlyStopping.FULL, "never": EarlyStopping.NEVER}
"""By the name that transformers gives it."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Tiny, with so few tokens that every one of them comes up often."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    found = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return found


def candidates_of(model: LlamaForCausalLM, texts: Sequence[Sequence[int]], count: int) -> list[BeamCandidates]:
    """The best next tokens of each text, all of the same length."""
    with torch.inference_mode():
        logits = model(torch.tensor(texts)).logits[:, -1].float()
    best = torch.log_softmax(logits, dim=-1).topk(min(count, VOCAB_SIZE))
    return [
        BeamCandidates(
            [BeamCandidate(token_id, score, score) for token_id, score in zip(ids, scores, strict=True)], top=[]
        )
        for ids, scores in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def search(
    model: LlamaForCausalLM, prompt: list[int], params: BeamParams, ending_ids: Sequence[int]
) -> list[tuple[list[int], float]]:
    """The ended texts and their scores, best first."""
    found = BeamSearch(params, max_new_tokens=NUM_NEW, num_ending_ids=len(ending_ids))
    while not found.is_over:
        texts = [[*prompt, *(one.token_id for one in node.tokens())] if node else prompt for node in found.beams]
        rows = candidates_of(model, texts, found.num_candidates)
        following = found.advance(rows, lambda _, token_id: token_id in ending_ids)
        assert [node for _, node in following] == found.beams
    return [([one.token_id for one in text.node.tokens()], text.score) for text in found.ended]


def generated(
    model: LlamaForCausalLM, prompt: list[int], params: BeamParams, ending_ids: Sequence[int]
) -> list[tuple[list[int], float]]:
    """The same from transformers."""
    by_name: dict[Any, Any] = {found: name for name, found in EARLY_STOPPING.items()}
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.num_beams,
        length_penalty=params.length_penalty,
        early_stopping=by_name[params.early_stopping],
        eos_token_id=list(ending_ids) or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    texts = output.sequences[:, len(prompt) :].tolist()
    return [(cut(text, ending_ids), score) for text, score in zip(texts, output.sequences_scores.tolist(), strict=True)]


def cut(text: list[int], ending_ids: Sequence[int]) -> list[int]:
    """Without what fills it up after its end."""
    end = next((place for place, token_id in enumerate(text) if token_id in ending_ids), len(text) - 1)
    return text[: end + 1]


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.5])
@pytest.mark.parametrize("ending_ids", [(), (3, 11)])
def test_texts_and_scores_are_those_of_generate(
    model: LlamaForCausalLM, early_stopping: Any, length_penalty: float, ending_ids: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(3)
    num_short = 0
    for num_beams in (2, 5):
        params = BeamParams(num_beams, length_penalty, EARLY_STOPPING[early_stopping])
        prompt = rng.integers(0, VOCAB_SIZE, size=5).tolist()
        expected = generated(model, prompt, params, ending_ids)
        found = search(model, prompt, params, ending_ids)
        assert [text for text, _ in found] == [text for text, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)
        num_short += sum(len(text) < NUM_NEW for text, _ in found)
    if length_penalty < 1:  # more of it leaves the longest texts
        assert bool(num_short) == bool(ending_ids), "texts that end early are what this is about"


def test_a_text_that_a_callback_ends_is_an_ended_text(model: LlamaForCausalLM) -> None:
    """A stop string ends a beam like an id, although it is not counted among the ids."""
    search_ = BeamSearch(BeamParams(2), max_new_tokens=5, num_ending_ids=0)
    prompt = [1, 2, 3]
    rows = candidates_of(model, [prompt], search_.num_candidates)
    best = rows[0].best[0].token_id
    following = search_.advance(rows, lambda beam, token_id: token_id == best)
    assert best not in [node.token_id for _, node in following]
    assert [text.node.token_id for text in search_.ended] == [best]
    assert search_.ended[0].has_met_end
