"""/metrics over HTTP: what is on the page, who may ask, and what goes wrong."""

from __future__ import annotations

import asyncio
import urllib.error

import pytest

from kvpool.process.address import PortError
from kvpool.process.histogram import Histogram
from kvpool.process.metrics import MAX_CONNECTIONS, MAX_HEAD_BYTES, MetricsPage, MetricsServer, listen_for_metrics
from tests.scrape import scrape
from tests.until import until

HOST = "127.0.0.1"


def fill(page: MetricsPage) -> None:
    """One of each kind, one with labels that need quoting."""
    page.gauge("kvpool_blocks", "Blocks.", 3, state="free")
    page.gauge("kvpool_blocks", "Blocks.", 4, state='a "b"\n\\')
    page.counter("kvpool_calls", "Calls.", 7)
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(value)
    page.histogram("kvpool_seconds", "Time.", histogram, method="Describe")


def port_of(server: MetricsServer) -> int:
    return int(server.url.split(":")[2].partition("/")[0])


async def ask(server: MetricsServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port_of(server))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_client_reads_what_the_page_was_filled_with() -> None:
    async with MetricsServer(listen_for_metrics(HOST, 0), fill) as server:
        families = (await scrape(server.url)).families
    assert families["kvpool_blocks"].type == "gauge"
    states = {s.labels["state"]: s.value for s in families["kvpool_blocks"].samples}
    assert states == {"free": 3.0, 'a "b"\n\\': 4.0}
    assert families["kvpool_calls"].type == "counter"
    assert [(s.name, s.value) for s in families["kvpool_calls"].samples] == [("kvpool_calls_total", 7.0)]
    seconds = families["kvpool_seconds"]
    assert seconds.type == "histogram"
    # A bound belongs to its bucket.
    buckets = {s.labels["le"]: s.value for s in seconds.samples if s.name.endswith("_bucket")}
    assert buckets == {"0.1": 2.0, "1.0": 3.0, "+Inf": 4.0}
    totals = {s.name: s.value for s in seconds.samples if not s.name.endswith("_bucket")}
    assert totals == {"kvpool_seconds_count": 4.0, "kvpool_seconds_sum": pytest.approx(3.65)}
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET /metrics?name=x HTTP/1.1", b"200 OK"),
        (b"HEAD /metrics HTTP/1.0", b"200 OK"),
        (b"GET / HTTP/1.1", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1", b"405 Method Not Allowed"),
        (b"nonsense", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2 * MAX_HEAD_BYTES, b"431 Request Header Fields Too Large"),
    ],
    ids=["query", "head", "elsewhere", "post", "nonsense", "too large"],
)
async def test_each_request_gets_its_status(request_head: bytes, status: bytes) -> None:
    async with MetricsServer(listen_for_metrics(HOST, 0), fill) as server:
        answer = await ask(server, request_head + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n"), answer[:200]
        head, _, body = answer.partition(b"\r\n\r\n")
        if request_head.startswith(b"HEAD"):
            assert body == b""
        else:
            assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"


async def test_a_page_that_cannot_be_filled_is_an_error_and_the_next_one_is_whole() -> None:
    """Whoever looks at a process must not stop it."""
    is_broken = True

    def fill_or_fail(page: MetricsPage) -> None:
        if is_broken:
            raise RuntimeError("no numbers today")
        fill(page)

    async with MetricsServer(listen_for_metrics(HOST, 0), fill_or_fail) as server:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            await scrape(server.url)
        is_broken = False
        assert "kvpool_calls_total 7.0" in (await scrape(server.url)).text


async def test_silent_connections_are_bounded_and_hold_up_neither_others_nor_the_end() -> None:
    async with MetricsServer(listen_for_metrics(HOST, 0), fill) as server:
        silent = [await asyncio.open_connection(HOST, port_of(server)) for _ in range(MAX_CONNECTIONS)]
        await until(lambda: len(server._connections) == MAX_CONNECTIONS)
        assert await ask(server, b"") == b""  # closed, and nothing was said
        for _, writer in silent[1:]:
            writer.close()
        await until(lambda: len(server._connections) == 1)
        assert "kvpool_calls_total" in (await scrape(server.url)).text
    reader, writer = silent[0]
    assert await reader.read() == b""
    writer.close()


def test_what_cannot_be_listened_on_is_named_with_the_setting_to_change() -> None:
    with listen_for_metrics(HOST, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port}: .*in use; choose another --metrics-port"):
            listen_for_metrics(HOST, port)
    with pytest.raises(PortError, match=r"192\.0\.2\.1:0: .*choose another --metrics-host"):
        listen_for_metrics("192.0.2.1", 0)


def test_one_name_has_one_kind() -> None:
    page = MetricsPage()
    page.gauge("kvpool_x", "X.", 1)
    with pytest.raises(AssertionError, match="kvpool_x"):
        page.counter("kvpool_x", "X.", 1)
