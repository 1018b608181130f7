"""deploy/grafana/kvpool.json without a Grafana: the form that Grafana needs, and metrics that exist.

There is no schema of Grafana's to check it against, and no Grafana has read it; tests/observe runs its queries.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import yaml

from scripts.dashboard import document
from tests.deploy.expressions import DASHBOARD, alerts, metrics_in, panels, queries
from tests.docs.blocks import ROOT
from tests.docs.test_metrics_document import listed

UNITS = {"short", "s", "bytes", "Bps", "ops", "percentunit"}
"""Of Grafana's, those that the dashboard uses."""
OF_EVERY_TARGET = {"up"}


def covered(grid: dict[str, int]) -> set[tuple[int, int]]:
    """Its cells."""
    return {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}


def names() -> set[str]:
    """Every name that a series may have, but for those of the process."""
    found = set(OF_EVERY_TARGET)
    for name, metric in listed().items():
        found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if metric.kind == "histogram" else {name}
    return found


def test_the_file_is_what_make_docs_writes() -> None:
    assert document.FILE.read_text(encoding="utf-8") == document.document(), "run `make docs` and commit"


def test_panels_have_their_own_ids_and_titles() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) > 30
    assert len(set(titles)) == len(titles)


def test_the_grid_has_no_overlap_and_no_panel_beyond_its_edge() -> None:
    cells = [(panel["title"], covered(panel["gridPos"])) for panel in DASHBOARD["panels"]]
    for title, area in cells:
        assert area, title
        assert all(0 <= x < document.GRID_WIDTH for x, _ in area), title
    for (title, area), (other, other_area) in combinations(cells, 2):
        assert not area & other_area, (title, other)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_has_a_description_a_unit_and_queries_of_the_chosen_data_source(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["type"] in ("stat", "timeseries")
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["expr"].strip()
        assert target["legendFormat"]


def test_every_variable_that_is_used_exists_and_every_one_that_exists_is_used() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = " ".join(queries().values())
    assert variables - {"datasource"} == {name for name in ("worker", "instance") if f'=~"${name}"' in text}
    left = text.replace("$__rate_interval", "").replace('"$worker"', "").replace('"$instance"', "")
    assert "$" not in left


@pytest.mark.parametrize("expression", [*queries().values(), *(rule["expr"] for rule in alerts().values())])
def test_an_expression_asks_for_metrics_that_exist(expression: str) -> None:
    asked = {name for name in metrics_in(expression) if not name.startswith("process_")}
    assert metrics_in(expression)
    assert asked <= names(), asked - names()


def test_most_metrics_are_on_the_dashboard() -> None:
    """What is left out says nothing over time, or is told by another metric that is there."""
    shown = set().union(*map(metrics_in, queries().values()))
    left_out = {
        name for name in listed() if not name.startswith("vllm:") and not any(found.startswith(name) for found in shown)
    }
    assert left_out == {
        "kvpool_manager_info", "kvpool_manager_worker_info", "kvpool_worker_info",
        "kvpool_manager_calls_under_way", "kvpool_manager_sequences", "kvpool_manager_requests",
        "kvpool_manager_generated_tokens_total", "kvpool_worker_prompt_tokens_total",
        "kvpool_worker_capacity_blocks", "kvpool_worker_held_blocks", "kvpool_worker_reserve_blocks",
        "kvpool_worker_kv_cache_bytes", "kvpool_worker_session_open", "kvpool_worker_draining",
        "kvpool_worker_sessions_total", "kvpool_worker_manager_calls_total",
        "kvpool_gateway_info", "kvpool_gateway_request_seconds", "kvpool_gateway_max_connections",
    }  # fmt: skip


def test_grafana_finds_the_data_source_and_the_dashboard_where_compose_puts_them() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    (provider,) = yaml.safe_load((folder / "dashboards" / "kvpool.yml").read_text())["providers"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    assert mounted[provider["options"]["path"] + "/kvpool.json"] == "./deploy/grafana/kvpool.json"
    assert mounted["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
