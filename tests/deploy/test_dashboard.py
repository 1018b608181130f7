"""deploy/ without Prometheus and Grafana: what an alert must say, the form of the dashboard, and metrics that exist.

There is no schema of Grafana's to check it against, and no Grafana has read it; `make test SUITE=observe` runs the queries,
and makes the faults that alerts name.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from scripts.dashboard import document
from tests.deploy.expressions import DASHBOARD, RULES_FILE, SCRAPES_FILE, alerts, metrics_in, panels, queries
from tests.docs.blocks import ROOT
from tests.docs.test_metrics_document import listed
from tests.observe.faults import FIRED_BY

JOBS = {"kvpool-manager", "kvpool-worker", "kvpool-gateway"}
UP_FILE = SCRAPES_FILE.with_name("kvpool-up.yml")


@pytest.mark.parametrize("rule", alerts().values(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_what_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Kvpool(?:[A-Z][a-z]+)+", rule["alert"])
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert rule["annotations"]["summary"].endswith(".")
    assert len(rule["annotations"]["description"]) > 50


def test_the_fault_of_every_alert_is_made_in_a_test() -> None:
    made = [name for names in FIRED_BY.values() for name in names]
    assert set(made) == alerts().keys()


def test_jobs_in_rules_are_jobs_of_the_scrapes() -> None:
    text = RULES_FILE.read_text()
    assert set(re.findall(r'job="([^"]+)"', text)) == JOBS
    for file in (SCRAPES_FILE, UP_FILE):
        config = yaml.safe_load(file.read_text())
        assert {scrape["job_name"] for scrape in config["scrape_configs"]} == JOBS
        assert [file.parent / rules for rules in config["rule_files"]] == [RULES_FILE]


def test_compose_is_scraped_at_the_ports_that_it_sets() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load(SCRAPES_FILE.read_text())
    targets = {
        scrape["job_name"]: [target for group in scrape["static_configs"] for target in group["targets"]]
        for scrape in config["scrape_configs"]
    }
    manager = services["manager"]["environment"]["KVPOOL_MANAGER_METRICS_PORT"]
    assert targets["kvpool-manager"] == [f"manager:{manager}"]
    workers = [name for name in services if name.startswith("worker-") and "profiles" not in services[name]]
    ports = [services[name]["environment"]["KVPOOL_WORKER_METRICS_PORT"] for name in workers]
    assert targets["kvpool-worker"] == [f"{name}:{port}" for name, port in zip(workers, ports, strict=True)]
    assert targets["kvpool-gateway"] == [], "it is on the machine's loopback"


def test_scrapes_of_up_are_the_ports_that_it_gives_out() -> None:
    text = UP_FILE.read_text()
    assert "kvpool up --workers 2 --metrics-port 9500 --http 8000" in text
    assert re.findall(r'"127\.0\.0\.1:(\d+)"', text) == ["9500", "9501", "9502", "8000"]


# -- deploy/grafana/kvpool.json


UNITS = {"short", "s", "bytes", "Bps", "ops", "percentunit"}
"""Of Grafana's, those that the dashboard uses."""


def covered(grid: dict[str, int]) -> set[tuple[int, int]]:
    return {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}


def names() -> set[str]:
    """Every name that a series may have, but for those of the process."""
    found = {"up"}
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
