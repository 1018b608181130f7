"""The PromQL of deploy/: of the dashboard's panels and of the alerts."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml

from tests.docs.blocks import ROOT

DASHBOARD: Final[dict[str, Any]] = json.loads((ROOT / "deploy" / "grafana" / "kvpool.json").read_text())
RULES_FILE: Final = ROOT / "deploy" / "prometheus" / "kvpool-alerts.yml"
SCRAPES_FILE: Final = ROOT / "deploy" / "prometheus" / "prometheus.yml"

_NAME = re.compile(r"(?<![\w\"$.])(?:kvpool_\w+|vllm:\w+|process_\w+|up)(?![\w\"])")


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by name."""
    groups = yaml.safe_load(RULES_FILE.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    named = {rule["alert"]: rule for rule in rules}
    assert len(named) == len(rules), "two alerts of one name"
    return named


def panels() -> list[dict[str, Any]]:
    """Those that show something: no titles of rows."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """The dashboard's expressions, by panel and letter."""
    return {f"{panel['title']} {target['refId']}": target["expr"] for panel in panels() for target in panel["targets"]}


def metrics_in(expression: str) -> set[str]:
    """The names of metrics in it."""
    return set(_NAME.findall(expression))
