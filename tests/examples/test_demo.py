"""`make demo`: a cluster with a real model answers the visitors of two desks, and all of it stops."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from examples.demo import CHATS, demo
from tests.cluster.forked_children import forked_children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_each_desk_is_served_from_one_cache_and_nothing_is_left_behind() -> None:
    output = io.StringIO()
    with forked_children():
        status = await demo(Console(file=output, width=120))
    said = output.getvalue()
    assert status == 0, said
    assert "one manager" in said
    questions = [question for _, questions in CHATS.values() for question in questions]
    assert [question for question in questions if question not in said] == []
    assert re.search(r"[\d,]+ of [\d,]+ prompt tokens \([1-9]\d?%\) were served from the cache", said)
    assert len(re.findall(r"worker-\d now: 0 blocks held, [1-9]\d* cached", said)) == 2
    assert re.search(r"audit of [\d,]+ blocks: 0 violations", said)
    assert said.endswith("stopping the manager and both workers\n")
