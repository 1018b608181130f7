"""docs/METRICS.md lists what the pages have, with types, labels and help texts, and nothing else."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvpool.cache_service import worker_codec
from kvpool.cache_service.audits import Audits
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.counts import EdgeCounts
from kvpool.cache_service.metrics import ManagerMetrics
from kvpool.gateway.app import connection_limits
from kvpool.gateway.metrics import GatewayMetrics
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.metrics import MetricsPage
from kvpool.worker_service.metrics import WorkerMetrics
from tests.cache_service.edge.peer import registration
from tests.docs.blocks import ROOT
from tests.worker_service.test_worker_metrics import FACTS, KV_CACHE_BYTES, one_world

_ROW = re.compile(r"^\| `(?P<name>\S+)` \| (?P<kind>\w+) \| (?P<labels>[\w, ]*)\| (?P<help>\S.*) \|$", re.MULTILINE)


class Listed(NamedTuple):
    kind: str
    labels: frozenset[str]
    help: str


def listed() -> dict[str, Listed]:
    """What the document says; vLLM's names have two labels more than their rows."""
    found = {}
    for row in _ROW.finditer((ROOT / "docs" / "METRICS.md").read_text()):
        name, labels = row["name"], {label.strip() for label in row["labels"].split(",")} - {""}
        if name.startswith("vllm:") and name != "vllm:cache_config_info":
            labels |= {"model_name", "engine"}
        assert name not in found, name
        found[name] = Listed(row["kind"], frozenset(labels), row["help"].replace("`", ""))
    return found


def on(page: MetricsPage) -> dict[str, Listed]:
    """What a page has, without the metrics of the process."""
    found = {}
    for family in page.collect():
        if not family.name.startswith("process_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
            found[name] = Listed(family.type, labels, family.documentation)
    return found


async def test_the_document_lists_what_there_is() -> None:
    manager, counts = CacheManager(1), EdgeCounts()
    manager.register(worker_codec.decode_registration(registration()), 0.0)
    counts.on_begun()
    counts.on_call("Append", "OK", 0.001)
    managers, workers = MetricsPage(), MetricsPage()
    of_manager = ManagerMetrics(counts, lambda: 0)
    of_manager.fill_process(managers, leads=True)
    of_manager.fill(managers, manager, Audits(manager), 0.0)
    world = one_world()
    WorkerMetrics(world.engine, world.link, FACTS, KV_CACHE_BYTES, lambda: 0).fill(workers)
    gateways, counted = MetricsPage(), GatewayMetrics()
    counted.requests["/health", 200] += 1
    counted.fill(gateways, connection_limits(GatewaySettings()), num_viewers=0)
    assert listed() == on(managers) | on(workers) | on(gateways)
