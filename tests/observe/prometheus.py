"""A real Prometheus over a cluster of a test: the rules and scrapes of deploy/, with other targets and shorter times."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster.cluster import HOST, free_port
from tests.cluster.process import EXECUTE, Process
from tests.deploy.expressions import RULES_FILE, SCRAPES_FILE
from tests.until import eventually

WINDOW: Final = "15s"
"""Instead of five minutes, and of Grafana's $__rate_interval."""
_INTERVAL: Final = "1s"
_INSTALL: Final = (
    "On Debian: apt-get install -y --no-install-recommends prometheus (and stop the service that it starts)."
)


def missing() -> str | None:
    """What must be installed for these tests; None if all is there."""
    absent = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"There is no command {' or '.join(absent)}. {_INSTALL}" if absent else None


def promtool(*arguments: str) -> None:
    """Let promtool check a file. AssertionError with its words."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def concrete(expression: str) -> str:
    """A dashboard's expression with its variables filled in: everything is chosen."""
    return re.sub(r"\$(?:worker|instance)\b", ".*", expression.replace("$__rate_interval", WINDOW))


def rules() -> str:
    """The alerts, which wait a second instead of minutes and look back over seconds instead of five minutes."""
    return re.sub(r"(?m)^( +for:) .*", r"\1 1s", RULES_FILE.read_text().replace("[5m]", f"[{WINDOW}]"))


def scrapes(targets: Mapping[str, Sequence[str]], rules_file: Path) -> str:
    """The scrapes of compose, of these targets by job."""
    config = yaml.safe_load(SCRAPES_FILE.read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), _INTERVAL)
    config["rule_files"] = [str(rules_file)]
    for scrape in config["scrape_configs"]:
        scrape["static_configs"] = [{"targets": list(targets[scrape["job_name"]])}]
    text: str = yaml.safe_dump(config)
    return text


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://{HOST}:{port}"

    async def query(self, expression: str) -> list[float]:
        """The values of all series, now. AssertionError if Prometheus refuses the expression."""
        answer = await self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        return [float(sample["value"][1]) for sample in answer["result"]]

    async def has_data(self, expression: str) -> bool:
        """Whether there is a number; NaN, the quantile of nothing, is none."""
        return any(not math.isnan(value) for value in await self.query(expression))

    async def firing(self) -> dict[str, dict[str, str]]:
        """The alerts that fire now, with the annotations of one series of each."""
        answer = await self._get("/api/v1/alerts")
        return {
            alert["labels"]["alertname"]: alert["annotations"]
            for alert in answer["alerts"]
            if alert["state"] == "firing"
        }

    async def is_ready(self) -> bool:
        """Whether it has loaded its files."""
        try:
            await asyncio.to_thread(self._read, "/-/ready")
        except OSError:
            return False
        return True

    async def _get(self, path: str) -> Any:
        answer = json.loads(await asyncio.to_thread(self._read, path))
        assert answer["status"] == "success", answer
        return answer["data"]

    def _read(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(self._url + path, timeout=10) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 400:
                raise AssertionError(f"{path}: {error.read().decode()}") from None
            raise


@asynccontextmanager
async def run_prometheus(folder: Path, targets: Mapping[str, Sequence[str]]) -> AsyncIterator[Prometheus]:
    """Start one that keeps all it has in the folder, and end it."""
    port = free_port()
    process = _start(folder, targets, port)
    prometheus = Prometheus(port)

    async def ready() -> bool:
        assert process.status is None, process.log
        return await prometheus.is_ready()

    try:
        await eventually(ready, "Prometheus is ready", 120)
        yield prometheus
    finally:
        process.kill()


def _start(folder: Path, targets: Mapping[str, Sequence[str]], port: int) -> Process:
    folder.mkdir()
    rules_file, config = folder / "rules.yml", folder / "prometheus.yml"
    rules_file.write_text(rules())
    config.write_text(scrapes(targets, rules_file))
    promtool("check", "config", str(config))
    binary = shutil.which("prometheus")
    assert binary is not None, missing()
    flags = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
        # What is gone from a page is gone from the answers soon, not five minutes later.
        "--query.lookback-delta=5s",
    ]
    return Process("prometheus", ["-c", EXECUTE, binary, *flags], folder / "log", {})
