"""A chat template is a stranger's program: it gets what templates need and nothing else, takes neither the client's memory nor its
time nor its process with it, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import (
    ClientConfig,
    FailedPrecondition,
    InvalidRequest,
    KvpoolError,
    ProtocolError,
    ServiceError,
    SyncClient,
    template_child,
)
from kvpool.client.chat_template import ChatTemplate
from kvpool.client.model_files import DEFAULT_MAX_BYTES
from kvpool.client.template_child import MEMORY_BYTES
from kvpool.client.template_process import TemplateProcess, _Child
from kvpool.v1 import worker_pb2
from tests.client.clients import quick
from tests.client.fakes import FakeModel, FakeWorker, fake_cluster
from tests.client.processes import is_alive, parent
from tests.client.words import text_files
from tests.python_program import run_python
from tests.until import until

BOUND_SECONDS = 60
USER = [{"role": "user", "content": "hi"}]
HONEST = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"


def render(process: TemplateProcess, source: str, messages: Sequence[Any] = USER, **arguments: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, process=process, now=lambda: datetime(2026, 11, 20))
    return template.render(messages, arguments=arguments)


def children() -> set[int]:
    """Process ids of the template processes that this process has started and that run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(folder.name)
            if parent(pid) == os.getpid() and is_alive(pid) and b"template_child" in (folder / "cmdline").read_bytes():
                found.add(pid)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ strftime_now.__closure__[0].cell_contents.__globals__['__builtins__'] }}",
        "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_hostile_template_does_not_escape(process: TemplateProcess, source: str) -> None:
    """Each is a known way out of jinja2. None may reach a class, a function's globals or a file."""
    try:
        rendered = render(process, source)
    except InvalidRequest:
        return
    assert rendered.strip() == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({}) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ messages[0].pop('content') }}",
    ],
)
def test_a_template_changes_nothing_that_it_is_given(process: TemplateProcess, source: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        render(process, source, messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_templates_find_what_transformers_gives_them(process: TemplateProcess) -> None:
    assert render(process, "{{ bos_token }}") == "<s>"
    content = "hi <b> & ü"
    assert (
        render(process, "{{ messages[0].content | tojson }}", [{"role": "user", "content": content}]) == f'"{content}"'
    )
    assert render(process, "{{ messages | tojson(indent=1) }}").startswith('[\n {\n  "role"')
    assert render(process, "{{ strftime_now('%Y-%m-%d') }}") == "2026-11-20"
    assert render(process, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render(process, "{% generation %}{{ messages[0].role }}{% endgeneration %}") == "user"
    assert render(process, "  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render(process, "{{ tools is none }} {{ documents is none }}") == "True True"
    assert render(process, "{{ add_generation_prompt }} {{ enable_thinking }}", enable_thinking=False) == "True False"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{% for %}", "{{ nothing.there }}"])
def test_a_template_that_fails_is_told_as_such(process: TemplateProcess, source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(process, source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 10000000000 }}", ""),
        ("{{ 10000000000 * 'a' }}", ""),
        ("{{ 10 ** 10000000000 }}", ""),
        ("{{ range(100000000)|list }}", ""),
        ("{{ 'a'.ljust(10**9) }}", f"needed more than {MEMORY_BYTES >> 20} MiB of memory"),
        ("{{ 'a'|center(10**9) }}", ""),
        ("{{ 'a'|center(1000000000) }}", ""),
        ("{{ '{:>1000000000}'.format(1) }}", ""),
        ("{{ '%1000000000d' % 1 }}", ""),
        ("{{ '%1000000000d'|format(1) }}", ""),
        ("{{ ('a,' * 500000).split(',')|join('a' * 1000) }}", ""),
        ("{{ messages|tojson(indent=500000000) }}", ""),
        (DOUBLING + "{{ ns.s }}", ""),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ""),
        # On a machine that is busy with other work two seconds of computing may take longer than may pass by the clock.
        (ENDLESS, "(took more than 2 s of computing|did not end within 10 s)"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "rendered more than 16777216 characters"),
        ("{{ raise_exception('x' * 1000000) }}", "refused: xxx"),
    ],
)
def test_an_attack_ends_with_an_error_and_the_next_chat_is_served(
    process: TemplateProcess, source: str, words: str
) -> None:
    """The attacks take gigabytes, do not end, or recurse too deeply. The error says which bound was exceeded."""
    with pytest.raises(InvalidRequest, match=f"the model's chat template {words}") as caught:
        render(process, source)
    assert caught.value.reason == "BAD_TEMPLATE"
    assert len(str(caught.value)) < 2000
    assert render(process, HONEST) == "<user>hi"


def test_templates_that_stay_within_the_bounds_are_rendered(process: TemplateProcess) -> None:
    messages = [{"role": "user", "content": "é€𝄞\ud83d " * 200_000}] * 3
    for _ in range(3):
        text = render(process, HONEST, messages)
        assert text == "".join(f"<user>{message['content']}" for message in messages)


def test_a_process_that_was_killed_is_replaced() -> None:
    with contextlib.closing(TemplateProcess()) as process, ThreadPoolExecutor(1) as thread:
        before = children()
        for _ in range(2):
            assert render(process, HONEST) == "<user>hi"
            (started,) = children() - before
            os.kill(started, signal.SIGKILL)
        assert render(process, HONEST) == "<user>hi"
        (started,) = children() - before
        os.kill(started, signal.SIGSTOP)
        answer = thread.submit(render, process, HONEST)
        os.kill(started, signal.SIGKILL)
        assert answer.result(BOUND_SECONDS) == "<user>hi"


def test_several_threads_share_one_process(process: TemplateProcess) -> None:
    render(process, HONEST)
    before = children()
    with ThreadPoolExecutor(8) as threads:
        chats = [[{"role": "user", "content": f"{n} " * 1000 * n}] for n in range(40)]
        answers = list(threads.map(partial(render, process, HONEST), chats))
    assert answers == [f"<user>{chat[0]['content']}" for chat in chats]
    assert children() == before


async def test_closing_ends_it_while_it_renders() -> None:
    process = TemplateProcess()
    before = children()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(render, process, ENDLESS)
        await until(lambda: children() - before)
        process.close()
        assert children() <= before
        assert isinstance(answer.exception(BOUND_SECONDS), KvpoolError)
    process.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        render(process, HONEST)
    assert children() <= before


def test_an_interrupt_in_the_middle_leaves_no_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as the answer comes: the next one would get it."""
    read, interrupts = _Child._read, [KeyboardInterrupt]

    def interrupted(child: _Child, num_bytes: int) -> bytes:
        if interrupts:
            raise interrupts.pop()
        return read(child, num_bytes)

    with contextlib.closing(TemplateProcess()) as process:
        render(process, HONEST)
        monkeypatch.setattr(_Child, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render(process, HONEST, [{"role": "user", "content": "old"}])
        for n in range(3):
            assert render(process, HONEST, [{"role": "user", "content": str(n)}]) == f"<user>{n}"


def test_a_process_that_cannot_be_started_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    for command in (("/nowhere/python",), (sys.executable, "-c", "raise SystemExit(7)")):
        monkeypatch.setattr("kvpool.client.template_process._COMMAND", command)
        with (
            contextlib.closing(TemplateProcess()) as process,
            pytest.raises(ServiceError, match="cannot be started") as caught,
        ):
            render(process, HONEST)
        assert command[0] in str(caught.value)
    assert children() == before


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}])
def test_what_is_no_json_is_refused(value: object) -> None:
    process, before = TemplateProcess(), children()
    with pytest.raises(InvalidRequest, match="JSON"):
        render(process, HONEST, [{"role": "user", "content": value}])
    assert children() == before


SCRIPT = """
import os, signal, sys, threading, time
from kvpool.client.chat_template import ChatTemplate
os.setsid()
template = ChatTemplate({source!r}, {{}})
if {endless}:
    threading.Thread(target=template.render, args=([{{"role": "user"}}],), daemon=True).start()
    while template._process._child is None:
        time.sleep(0.01)
else:
    template.render([{{"role": "user", "content": "x"}}])
print(template._process._child._process.pid, flush=True)
{end}
"""
LAST_LINE, CTRL_C = "", "os.killpg(os.getpgrp(), signal.SIGINT); time.sleep(60)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("end", "endless"),
    [(LAST_LINE, False), (LAST_LINE, True), (CTRL_C, True), (KILLED, False), (KILLED, True)],
    ids=["its last line, idle", "its last line", "Ctrl-C", "killed, idle", "killed"],
)
async def test_no_process_is_left_behind(end: str, endless: bool) -> None:
    """However the client's process ends, with the interpreter's own end or without, and whether a template is being rendered."""
    script = SCRIPT.format(source=ENDLESS if endless else HONEST, endless=endless, end=end)
    child = int((await asyncio.to_thread(run_python, "-c", script)).stdout)
    await until(lambda: not is_alive(child))


async def test_the_process_starts_with_a_clients_first_chat_and_ends_with_the_client() -> None:
    before = children()
    async with fake_cluster(FakeWorker("w")) as manager:
        async with quick(manager) as client:
            assert (await client.generate("the").collect()).text
            assert (await client.model()).chat_template is not None
            assert children() == before
            await asyncio.gather(*(client.chat(USER).collect() for _ in range(5)))
            assert len(children() - before) == 1
        assert children() == before

        def in_a_thread() -> None:
            with SyncClient(manager.address) as client:
                client.chat(USER).collect()
                assert len(children() - before) == 1

        await asyncio.to_thread(in_a_thread)
    assert children() == before


async def test_an_error_of_a_template_is_an_error_of_its_chat() -> None:
    worker = FakeWorker("w", model=FakeModel(files=text_files("{{ raise_exception('roles must alternate') }}")))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match="chat template refused: roles must alternate"):
            await client.chat(USER).collect()
        assert (await client.generate("the").collect()).text


class Announcing(FakeModel):
    """Announces files that it never sends."""

    def messages(self, worker_id: str) -> list[worker_pb2.GetModelResponse]:
        (facts, *_) = super().messages(worker_id)
        facts.facts.files[0].size_bytes = DEFAULT_MAX_BYTES
        return [facts]


async def test_model_files_are_bounded_in_all_before_they_are_received() -> None:
    worker = FakeWorker("w", model=Announcing())
    async with fake_cluster(worker) as manager, quick(manager) as client:
        with pytest.raises(ProtocolError, match=rf"at most {DEFAULT_MAX_BYTES}.*max_model_bytes") as caught:
            await client.model()
    assert caught.value.reason == "MODEL_TOO_LARGE"


async def test_the_bound_of_model_files_is_a_setting() -> None:
    total = sum(len(content) for content in FakeModel().files.values())
    async with fake_cluster(FakeWorker("w")) as manager:
        async with quick(manager, max_model_bytes=total) as client:
            assert (await client.model()).name
        async with quick(manager, max_model_bytes=total - 1) as client:
            with pytest.raises(ProtocolError, match=f"{total} bytes in all"):
                await client.model()
    for wrong in (0, 2**33):
        with pytest.raises(InvalidRequest, match="max_model_bytes"):
            ClientConfig(max_model_bytes=wrong)


def test_the_child_imports_nothing_of_ours() -> None:
    """It has to start in a tenth of a second, and small."""
    code = f"import json, runpy, sys; runpy.run_path({template_child.__file__!r}); print(json.dumps(list(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python("-P", "-c", code).stdout)}
    assert "jinja2" in loaded
    assert not loaded & {"kvpool", "client", "grpc", "google", "tokenizers", "numpy", "asyncio", "pydantic"}
