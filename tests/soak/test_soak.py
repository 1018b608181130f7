"""The soak in small, and that its judges can find something."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvpool.client import Client
from tests.cluster.in_process import in_process_cluster
from tests.cluster.models import make_endless_model
from tests.model.plain_loop import PlainLoop
from tests.soak.questions import Question
from tests.soak.readers import Readers, Told
from tests.soak.soak import Pool, Settings, soak
from tests.soak.watch import GROWTH_BYTES, GROWTH_FILES, Holding, growth

SMALL = Settings(
    seconds=4.0,
    num_streams=150,
    pools=(Pool(90, 8),),
    num_readers=16,
    num_questions=12,
    num_tokens=24,
    seconds_between_looks=0.5,
)


@pytest.mark.slow
async def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    """Full pools and readers that leave: no token differs, nothing is left behind. Too short to tell what grows."""
    result = await soak(SMALL, tmp_path, lambda *_: None)
    assert result.violations == []
    assert result.told.num_preemptions > 0
    assert {"left by its reader", "whole, length"} <= set(result.told.outcomes)


async def test_a_wrong_token_is_found(tmp_path: Path) -> None:
    """The right answers say another token: every reader who gets so far says so."""
    model = make_endless_model(tmp_path / "model", tokenizer=True)
    right = PlainLoop(model.path).text((1, 2, 3), {}, 4)
    wrong = Question((1, 2, 3), {}, (*right[:3], right[3] ^ 1))
    async with in_process_cluster(model.path, tmp_path) as cluster:
        told = Told()
        await _ask_once(cluster.client, wrong, told)
    assert told.violations
    assert all("token 3 is" in violation for violation in told.violations)


async def _ask_once(client: Client, question: Question, told: Told) -> None:
    readers = Readers(client, [question], 4, random.Random(1), told)
    readers.start()
    while not told.violations and sum(told.outcomes.values()) < 200:
        await asyncio.sleep(0.01)
    await readers.finish()


def _holdings(rss: list[int], files: list[int]) -> list[Holding]:
    return [Holding(float(at), *pair) for at, pair in enumerate(zip(rss, files, strict=True))]


def test_what_grows_is_found_and_the_beginning_and_peaks_are_not() -> None:
    quiet = [50 << 20, *[100 << 20] * 10, 300 << 20, *[101 << 20] * 10]
    assert growth("w", _holdings(quiet, [20] * 22)).problems == []
    rising = [(100 << 20) + at * GROWTH_BYTES // 10 for at in range(22)]
    assert len(growth("w", _holdings(rising, [20] * 22)).problems) == 1
    opening = [20 + at * GROWTH_FILES // 8 for at in range(22)]
    assert len(growth("w", _holdings(quiet, opening)).problems) == 1
