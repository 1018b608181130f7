"""Reads /metrics as Prometheus does."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Series = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}
        self.values: dict[Series, float] = {}
        for family in self.families.values():
            for sample in family.samples:
                series = sample.name, frozenset(sample.labels.items())
                assert series not in self.values, f"{series} is told twice"
                self.values[series] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """Of the one series with exactly these labels."""
        return self.values[name, frozenset(labels.items())]

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """Values of a metric by one of its labels."""
        return {dict(labels)[label]: value for (found, labels), value in self.values.items() if found == name}


async def scrape(url: str) -> Scrape:
    """Ask, off the event loop."""

    def get() -> str:
        with urllib.request.urlopen(url, timeout=30) as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return str(response.read().decode())

    return Scrape(await asyncio.to_thread(get))


def num_listening_sockets(pid: int | str = "self") -> int:
    """TCP sockets of a process that listen. Linux only."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return sum(link in inodes for link in links)
