"""The proof of `make prove KIND=live` in small."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.client import Completion
from tests.client.clients import begun
from tests.cluster.cluster import MANAGER, Cluster
from tests.cluster.models import make_endless_model
from tests.live.faults import Fault
from tests.live.proof import Settings, prove
from tests.live.workload import STATES, TINY, WINDOWS
from tests.model.plain_loop import PlainLoop

STEP_SECONDS = 0.05
"""A stream lasts as long as the faults need, at a step's cost of the processor for each 50 ms."""

SETTINGS = Settings(
    model=TINY,
    kills=1,
    worker_faults=len(Fault),
    outage_seconds=0.0,
    reserve_seconds=15.0,
    workers=2,
    streams=4,
    requests=4,
    seed=2,
    lease_seconds=1.0,
    keep_alive_seconds=0.1,
    num_new=20,
    pause_seconds=0.1,
    step_seconds=STEP_SECONDS,
)
OF_THE_CACHE = (Fault.KILLED,)
"""What is in the groups of a cache comes into play: texts are computed anew. A new session is told what is held when the manager is
killed."""
NUM_NEW = 40


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kinds"), [(TINY, tuple(Fault)), (WINDOWS, OF_THE_CACHE), (STATES, OF_THE_CACHE)])
async def test_no_text_is_disturbed_whatever_happens_to_manager_and_workers(
    model: str, kinds: tuple[Fault, ...], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, model=model, fault_kinds=kinds, worker_faults=len(kinds))
    result = await prove(settings, tmp_path, lambda what, done, of: None)
    assert json.loads(json.dumps(result.as_json()))["violations"] == []
    assert [phase.faults for phase in result.phases] == [1, len(kinds)]
    for phase in result.phases:
        assert phase.hit >= phase.faults  # each waits for a stream that it hits
        assert phase.streams.num_streams >= SETTINGS.streams
    assert result.worker_faults == dict.fromkeys(kinds, 1)


@pytest.mark.slow
async def test_a_manager_that_dies_costs_no_token_to_be_computed_again(tmp_path: Path) -> None:
    """The worker has forwarded every token once: Σ(prompt − cached + generated − 1)."""
    model = make_endless_model(tmp_path / "endless")
    prompts = [[200 + index, *range(20)] for index in range(4)]
    async with Cluster(tmp_path, lease_seconds=2.0, keep_alive_seconds=0.2) as cluster:
        # A reserve for longer than a manager takes to start, however busy the machine is.
        settings = {"block_size": 4, "num_blocks": 8193, "reserve_seconds": 60, "step_seconds": STEP_SECONDS}
        await cluster.start({"a": {"model": model.path, **settings}})
        async with cluster.client() as client:
            streams = [await begun(client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True)) for prompt in prompts]
            for _ in range(2):
                cluster.kill(MANAGER)
                await cluster.start_manager()
                await cluster.until_registered("a")
            disturbed = [await stream.collect() for stream in streams]
        again = [await cluster.complete(prompt, max_tokens=5) for prompt in prompts]
        await cluster.until_clean()
        worker = cluster.processes["a"]
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0
    loop = PlainLoop(model.path)
    for prompt, outlived, later in zip(prompts, disturbed, again, strict=True):
        assert len(outlived.token_ids) == NUM_NEW
        assert all(is_tie for _, is_tie in loop.differences(prompt, {}, outlived.token_ids))
        assert (outlived.num_attempts, outlived.num_preemptions) == (1, 0)
        assert later.token_ids == outlived.token_ids[:5]
        assert later.num_cached_tokens == 20
    expected = sum(num_forwarded(answer) for answer in (*disturbed, *again))
    assert f" forwarded_tokens={expected} " in worker.log


def num_forwarded(answer: Completion) -> int:
    """Tokens that had to be computed for an answer, if each was computed once."""
    return answer.num_prompt_tokens - answer.num_cached_tokens + len(answer.token_ids) - 1
