"""The soak in small, and that its judges can find something."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from tests.cluster.in_process import in_process_cluster
from tests.cluster.models import make_endless_model
from tests.load.load import Load
from tests.load.workload import Reference, Request
from tests.model.plain_loop import PlainLoop
from tests.soak.soak import Settings, soak
from tests.soak.watch import GROWTH_BYTES, GROWTH_FILES, Holding, growth
from tests.soak.workload import make_call

SMALL = Settings(
    seconds=2.0,
    num_streams=60,
    pools=({"num_blocks": 64, "max_num_seqs": 8},),
    num_readers=16,
    num_requests=12,
    num_tokens=24,
    seconds_between_looks=0.3,
)


@pytest.mark.slow
async def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    """Full pools and readers that leave: no token differs, nothing is left behind. Too short to tell what grows."""
    result = await soak(SMALL, tmp_path, lambda *_: None)
    assert json.loads(json.dumps(result.as_json()))["violations"] == []
    assert result.totals.num_preemptions > 0
    assert {"left by its reader", "whole, length"} <= set(result.totals.outcomes)


async def test_a_wrong_token_is_found(tmp_path: Path) -> None:
    """The reference answer has another last token: every stream that is read that far is a violation."""
    model = make_endless_model(tmp_path / "model", tokenizer=True)
    request = Request(0, (1, 2, 3), 4, {})
    right = PlainLoop(model.path).text(request.prompt, request.sampling, request.max_tokens)
    wrong = Reference(request, (*right[:3], right[3] ^ 1))
    async with in_process_cluster(model.path, tmp_path) as cluster:
        load = Load(cluster.client, [wrong], 4, random.Random(1), make_call)
        async with load:
            while not load.violations and load.totals.num_streams < 200:
                await asyncio.sleep(0.01)
    assert load.violations
    assert all(f"token 3 is {right[3]}, not {right[3] ^ 1}" in violation for violation in load.violations)


def _holdings(rss: list[int], files: list[int]) -> list[Holding]:
    return [Holding(float(at), *pair) for at, pair in enumerate(zip(rss, files, strict=True))]


def test_what_grows_is_found_and_the_beginning_and_peaks_are_not() -> None:
    quiet = [50 << 20, *[100 << 20] * 10, 300 << 20, *[101 << 20] * 10]
    assert growth("w", _holdings(quiet, [20] * 22)).problems == []
    rising = [(100 << 20) + at * GROWTH_BYTES // 10 for at in range(22)]
    assert len(growth("w", _holdings(rising, [20] * 22)).problems) == 1
    opening = [20 + at * GROWTH_FILES // 8 for at in range(22)]
    assert len(growth("w", _holdings(quiet, opening)).problems) == 1
