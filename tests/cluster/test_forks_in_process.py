"""Several answers and beams over the real model: in float32 those of single requests, and of transformers' beam search."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvpool.client import Completion
from tests.cluster.in_process import TIGHT, InProcessCluster, in_process_cluster
from tests.lockstep import in_lockstep
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, Beam, Oracle, TinyModel, make_tiny_model

SEED = 2**64 - 2
LONGEST: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN}
"""Not every config says it."""
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95}
NUM_BEAMS = 4
PROMPTS = slice(2, 4)
"""Two of the model's, which begin alike."""


async def all_answers(cluster: InProcessCluster, prompt: tuple[int, ...], **options: Any) -> list[Completion]:
    return await cluster.client.generate(prompt, **options).collect_all()


async def single_answers(
    cluster: InProcessCluster, tiny: TinyModel, n: int, **options: Any
) -> list[list[tuple[int, ...]]]:
    """The tokens of n requests for each prompt, the seed of each one more than that of the one before. All at once, which changes
    none (`test_truth_in_process`), and with nothing from the cache of others."""
    seeds = [(SEED + index) % 2**64 for index in range(n)]
    found = await asyncio.gather(
        *(
            cluster.complete(prompt, seed=seed, tenant_salt=f"alone {seed}", **options)
            for prompt in tiny.prompts[PROMPTS]
            for seed in seeds
        )
    )
    return [[one.token_ids for one in found[start : start + n]] for start in range(0, len(found), n)]


async def check_answers(cluster: InProcessCluster, tiny: TinyModel, expected: list[list[tuple[int, ...]]]) -> None:
    """Those of all prompts at once are those of requests alone."""
    n = len(expected[0])
    found = await asyncio.gather(
        *(all_answers(cluster, prompt, n=n, seed=SEED, **common_options(tiny)) for prompt in tiny.prompts[PROMPTS])
    )
    assert [[answer.token_ids for answer in answers] for answers in found] == expected
    for prompt, answers in zip(tiny.prompts[PROMPTS], found, strict=True):
        assert {answer.num_prompt_tokens for answer in answers} == {len(prompt)}


def common_options(tiny: TinyModel) -> dict[str, Any]:
    return {**SAMPLED, "max_tokens": tiny.num_new_tokens, "ignore_eos": True}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("llama", {"runtime": "torch", "prefix_caching": False}), ("gemma2", {}), ("mamba2", {})],
)
async def test_answers_in_a_tight_pool_are_those_of_single_requests(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Cold and warm, and with the cache switched off: one model of each kind of pool. In a pool with room: beside beams, below."""
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    async with in_process_cluster(tiny.path, tmp_path, **LONGEST, **TIGHT, **settings) as cluster:
        expected = await single_answers(cluster, tiny, 3, **common_options(tiny))
        for _ in range(2):
            await check_answers(cluster, tiny, expected)


def found_beams(answers: list[Completion]) -> list[Beam]:
    assert all(answer.score is not None for answer in answers)
    return [Beam(list(answer.token_ids), answer.score or 0.0) for answer in answers]


def check_beams(found: list[Beam], expected: list[Beam]) -> None:
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in expected], rel=1e-4, abs=1e-4)


# Full attention, windows beside it, and states beside it.
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "lfm2"])
async def test_beams_are_those_of_generate(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path / architecture)
    oracle = Oracle.of(tiny.path)
    count = tiny.num_new_tokens
    common: dict[str, Any] = {"n": NUM_BEAMS, "num_beams": NUM_BEAMS, "max_tokens": count}
    expected = [oracle.beams(prompt, count, num_beams=NUM_BEAMS) for prompt in tiny.prompts[PROMPTS]]
    async with in_process_cluster(tiny.path, tmp_path, **LONGEST, num_blocks=257) as cluster:
        singles = await single_answers(cluster, tiny, 2, **common_options(tiny))
        for _ in range(2):
            beside = asyncio.create_task(check_answers(cluster, tiny, singles))
            found = await asyncio.gather(*(all_answers(cluster, prompt, **common) for prompt in tiny.prompts[PROMPTS]))
            await beside
            for one, other in zip(found, expected, strict=True):
                check_beams(found_beams(one), other)


async def test_searches_end_early_as_those_of_generate(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "llama")
    oracle = Oracle.of(tiny.path)
    prompt, count = tiny.prompts[1], tiny.num_new_tokens
    common: dict[str, Any] = {"n": NUM_BEAMS, "num_beams": NUM_BEAMS, "max_tokens": count}
    plain = oracle.beams(prompt, count, num_beams=NUM_BEAMS)
    few, many = [plain[0].tokens[4], plain[-1].tokens[6]], list(range(0, VOCAB_SIZE, 5))
    kinds_of_search: list[tuple[list[int], dict[str, Any]]] = [
        (many, {}),
        (many, {"early_stopping": "never"}),
        (many, {"early_stopping": True}),
        (few, {"early_stopping": "never", "length_penalty": 0.0}),
        (few, {"length_penalty": 2.0}),
        (few, {"repetition_penalty": 1.3}),
        (few, {"min_new_tokens": 7}),
    ]
    found: list[list[list[int]]] = []
    async with in_process_cluster(tiny.path, tmp_path, **LONGEST) as cluster:
        for ending_ids, options in kinds_of_search:
            others = oracle.beams(prompt, count, ending_ids=ending_ids, num_beams=NUM_BEAMS, **options)
            asked = {("min_tokens" if name == "min_new_tokens" else name): value for name, value in options.items()}
            answers = await all_answers(cluster, prompt, **common, **asked, stop_token_ids=ending_ids)
            check_beams(found_beams(answers), others)
            found.append([beam.tokens for beam in others])
        assert found[0] != found[1], "early_stopping should matter here"
        best = await cluster.client.generate(prompt, num_beams=NUM_BEAMS, max_tokens=count).collect()
        assert list(best.token_ids) == plain[0].tokens


async def test_beams_in_a_tight_pool_are_preempted_and_find_the_same(tmp_path: Path) -> None:
    """Groups give their blocks back and are computed again from their texts. A long text has 20 of 30 blocks before a search
    begins, and takes all before it ends. Four beams of 34 tokens have at least 12, so one of both must give way: the later one."""
    tiny = make_tiny_model("llama", tmp_path / "llama")
    oracle = Oracle.of(tiny.path)
    prompts = [prompt[:10] for prompt in tiny.prompts[:3]]
    long = tuple(range(80))
    settings = {**TIGHT, "num_blocks": 31, "max_num_seqs": 13, "max_num_batched_tokens": 16}
    async with in_process_cluster(tiny.path, tmp_path, **settings) as cluster:
        async with in_lockstep(cluster.worker.engine, 1 + len(prompts)):
            first = asyncio.create_task(cluster.complete(long, max_tokens=4 * 30 - len(long) + 1))
            await cluster.until_arrived(1)
            found = await asyncio.gather(
                *(all_answers(cluster, prompt, n=NUM_BEAMS, num_beams=NUM_BEAMS, max_tokens=24) for prompt in prompts)
            )
            assert (await first).num_preemptions == 0
        for prompt, answers in zip(prompts, found, strict=True):
            check_beams(found_beams(answers), oracle.beams(prompt, 24, num_beams=NUM_BEAMS))
        assert any(answers[0].num_preemptions for answers in found)


async def test_each_answer_has_all_that_was_asked_for(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "llama", tokenizer=True)
    prompt = "the cache keeps what it has read"
    common: dict[str, Any] = {
        **SAMPLED,
        "max_tokens": 12,
        "echo": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
    }
    async with in_process_cluster(tiny.path, tmp_path) as cluster:
        plain = await cluster.client.generate(prompt, seed=SEED, **common).collect()
        middle = plain.text[len(prompt) + 4 :]
        common["stop"] = next(sign for sign in middle if sign.isascii() and sign.isprintable())
        found = await cluster.client.generate(prompt, n=5, seed=SEED, **common).collect_all()
        for index, answer in enumerate(found):
            alone = await cluster.client.generate(prompt, seed=(SEED + index) % 2**64, **common).collect()
            for field in ("text", "token_ids", "finish_reason", "logprobs", "prompt_logprobs", "num_prompt_tokens"):
                assert getattr(answer, field) == getattr(alone, field), field
    assert {answer.finish_reason for answer in found} == {"stop", "length"}, "both ends should be there"


async def test_a_stop_string_ends_a_beam_and_tokens_have_their_log_probabilities(tmp_path: Path) -> None:
    tiny = make_tiny_model("llama", tmp_path / "llama", tokenizer=True)
    oracle = Oracle.of(tiny.path)
    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    prompt, count = tiny.prompts[1], 14
    plain = oracle.beams(prompt, count, num_beams=NUM_BEAMS)
    # What some of the beams have in the middle, as text; the oracle looks for it in the whole text.
    stop = next(
        text
        for place in range(4, count - 2)
        for text in [tokenizer.decode([plain[0].tokens[place]])]
        if text.isascii() and text.isprintable() and text not in tokenizer.decode(prompt)
    )
    async with in_process_cluster(tiny.path, tmp_path) as cluster:
        answers = await all_answers(
            cluster, prompt, n=NUM_BEAMS, num_beams=NUM_BEAMS, max_tokens=count, stop=stop, logprobs=1
        )
    expected = oracle.beams(prompt, count, num_beams=NUM_BEAMS, stop_strings=[stop], tokenizer=tokenizer)
    for answer, beam in zip(answers, expected, strict=True):
        assert list(answer.token_ids) == beam.tokens[: len(answer.token_ids)]
        assert answer.score == pytest.approx(beam.score, rel=1e-4, abs=1e-4)
        assert stop not in answer.text
        assert answer.logprobs is not None
        total = sum(one.logprob for one in answer.logprobs)
        assert total / len(answer.token_ids) == pytest.approx(answer.score, rel=1e-4, abs=1e-4)
        assert all(len(one.top) == 1 and one.logprob <= one.top[0][1] + 1e-6 for one in answer.logprobs)
    assert "stop" in {answer.finish_reason for answer in answers}
