"""lm-eval before kvpool: its scores are those of the model's logits, computed directly with transformers."""

from __future__ import annotations

from typing import Any, Final

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from tests.clients import driving
from tests.clients.served import MODEL, Served
from tests.cluster import smollm2
from tests.cluster.truth import LOGPROB_TOLERANCE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

QUESTIONS: Final[list[dict[str, Any]]] = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "Rome"], "answer": 0},
    {"question": "Water is made of hydrogen and", "choices": ["iron", "oxygen", "gold"], "answer": 1},
    {"question": "A spider has eight", "choices": ["wheels", "doors", "legs"], "answer": 2},
    {"question": "Hamlet was written by", "choices": ["William Shakespeare", "Jane Austen"], "answer": 0},
    {"question": "The opposite of hot is", "choices": ["fast", "cold", "north of the river"], "answer": 1},
    {"question": "東京は日本の", "choices": ["首都です", "月です"], "answer": 0},
    {"question": "The smallest prime number is", "choices": ["nine", "seven", "two"], "answer": 2},
    {
        "question": "The Brazilian who first walked to the moon was called",
        "choices": ["nobody", "João 🙂"],
        "answer": 0,
    },
]


def direct_scores() -> list[list[tuple[float, bool]]]:
    """For each choice of each question its log-probability, and whether each of its tokens is the most probable one."""
    model = AutoModelForCausalLM.from_pretrained(_folder(), dtype=torch.float32).eval()
    encode = smollm2.tokenizer().encode
    scores: list[list[tuple[float, bool]]] = []
    for question in QUESTIONS:
        scores.append([])
        num_context = len(encode(question["question"]).ids)
        for choice in question["choices"]:
            ids = encode(f"{question['question']} {choice}").ids
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, num_context - 1 : -1].log_softmax(-1)
            targets = torch.tensor(ids[num_context:])
            logprob = float(logits.gather(1, targets[:, None]).sum())
            scores[-1].append((logprob, bool((logits.argmax(-1) == targets).all())))
    return scores


def _folder() -> str:
    return str(resolve_model(MODEL, default_cache_dir(), print).path)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def seen(served: Served) -> dict[str, Any]:
    return await driving.drive("lm-eval", served, "Questions", questions=QUESTIONS, tokenizer=_folder())


async def test_scores_are_those_of_the_models_own_logits(seen: dict[str, Any]) -> None:
    direct = direct_scores()
    assert len({greedy for scores in direct for _, greedy in scores}) == 2, "the questions cannot tell"
    for scores, found in zip(direct, seen["choices"], strict=True):
        assert [greedy for _, greedy in found] == [greedy for _, greedy in scores]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in scores], abs=LOGPROB_TOLERANCE)
    best = [scores.index(max(scores)) for scores in direct]
    right = [found == question["answer"] for found, question in zip(best, QUESTIONS, strict=True)]
    assert seen["accuracy"] == pytest.approx(sum(right) / len(right))
