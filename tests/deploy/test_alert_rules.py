"""deploy/prometheus without a Prometheus: what an alert must say, and that its fault is made by `make test SUITE=observe`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.expressions import RULES_FILE, SCRAPES_FILE, alerts
from tests.docs.blocks import ROOT
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
    """As `kvpool up --workers 2 --metrics-port 9500 --http 8000`, which the file names."""
    text = UP_FILE.read_text()
    assert "kvpool up --workers 2 --metrics-port 9500 --http 8000" in text
    assert re.findall(r'"127\.0\.0\.1:(\d+)"', text) == ["9500", "9501", "9502", "8000"]
