"""Every expression of the dashboard has data on a real Prometheus over a real cluster under load, and no alert fires there.

`make test SUITE=observe` runs this file. `make test` does not collect it: it needs Prometheus.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.models import make_endless_model
from tests.deploy.expressions import DASHBOARD, RULES_FILE, alerts, metrics_in, queries
from tests.observe.observed_cluster import Observed, ObservedCluster, meanwhile, observe
from tests.observe.prometheus import concrete, promtool
from tests.until import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def conversation(number: int) -> list[int]:
    """Ten conversations with a long beginning in common, and an end of their own."""
    return [*range(1, 65), *(1 + (7 * number + index) % 200 for index in range(8 + number % 10))]


async def ask_over_http(cluster: ObservedCluster) -> None:
    """Completions over the gateway, one after the other, without end."""
    model = (await cluster.describe())[0].model_name
    for number in itertools.count():
        body = {"model": model, "prompt": conversation(number), "max_tokens": 8, "stream": True}
        await cluster.post("/v1/completions", body)


async def until_data(observed: Observed, expressions: dict[str, str]) -> None:
    """Until each has had data since this call."""
    left = dict(expressions)

    async def all_seen() -> bool:
        for name, text in list(left.items()):
            if await observed.prometheus.has_data(concrete(text)):
                del left[name]
        return not left

    try:
        await eventually(all_seen, "every expression has data", 240.0)
    except AssertionError:
        raise AssertionError(f"without data: {left}") from None


async def test_every_expression_has_data_under_load_and_no_alert_fires(tmp_path: Path) -> None:
    model = make_endless_model(tmp_path / "model", tokenizer=True)
    workers: dict[str, dict[str, Any]] = {
        name: {"model": model.path, "block_size": 4, "num_blocks": 257} for name in ("one", "two")
    }
    variables = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    chosen = {text: text.removeprefix("label_values(").split(",")[0] for text in variables}
    asked = {name for rule in alerts().values() for name in metrics_in(rule["expr"])}
    async with observe(tmp_path, workers, gateway=True) as observed:
        await observed.cluster.audit()
        async with observed.load(4, conversation, max_tokens=12), meanwhile(ask_over_http(observed.cluster)):
            await until_data(observed, queries())
            await until_data(observed, chosen | {name: name for name in asked if not name.endswith("_bucket")})
            assert await observed.prometheus.firing() == {}
        await observed.cluster.until_clean()


def test_promtool_finds_nothing_wrong_with_the_files_as_they_are() -> None:
    promtool("check", "rules", str(RULES_FILE))
    for name in ("prometheus.yml", "kvpool-up.yml"):
        promtool("check", "config", str(RULES_FILE.with_name(name)))
