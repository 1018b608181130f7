"""Commands of documents, run in this process where it has imported what they need: a process of its own takes a second for each."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn
from unittest import mock

from rich.console import Console

from kvpool.cache_service.settings import ManagerSettings
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.services import GATEWAY_MODULE, MANAGER_MODULE, WALKTHROUGH_MODULE, WORKER_MODULE
from kvpool.process.settings import ProcessSettings, load_settings
from kvpool.walkthrough.__main__ import main as walkthrough
from kvpool.worker_service.settings import WorkerSettings
from tests.client.commands import exit_status
from tests.docs.blocks import ROOT

_KVPOOL: Final = ".venv/bin/kvpool"
_SETTINGS: Final[Mapping[str, type[ProcessSettings]]] = {
    MANAGER_MODULE: ManagerSettings,
    WORKER_MODULE: WorkerSettings,
    GATEWAY_MODULE: GatewaySettings,
}


def run_here(command: str, environment: Mapping[str, str]) -> str | None:
    """What a command of `kvpool` prints on stdout, and its good end; None if it is not one, or needs a shell or a process."""
    words = shlex.split(command, comments=True)
    if words[0] != _KVPOOL or re.search(r"[|<>&;$`]", re.sub(r"'[^']*'|\"[^\"$`]*\"", "", command)):
        return None
    if words[1] in ("up", "manager", "worker", "gateway") and not {"--help", "--dry-run"} & set(words):
        return None
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    stderr = io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(os, "execv", _become),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        status = exit_status(words[1:])
    printed = stdout.buffer.getvalue().decode()
    assert status == 0, f"{command}\n{printed}\n{stderr.getvalue()}"
    return printed


def run_in_shell(commands: str, environment: Mapping[str, str] | None = None) -> str:
    """What commands print on stdout, run in the checkout. The last one must succeed; others may fail on purpose."""
    done = subprocess.run(
        ["bash", "-c", commands], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _become(program: str, command: Sequence[str]) -> NoReturn:
    """In place of os.execv, which would end the tests: what that program does with its arguments."""
    module, *arguments = command[command.index("-m") + 1 :]
    if module == WALKTHROUGH_MODULE:
        raise SystemExit(walkthrough(arguments))
    settings = load_settings(_SETTINGS[module], arguments)
    assert isinstance(settings, WorkerSettings), "--help ends the others"
    assert settings.dry_run
    from kvpool.worker_service.dry_run import dry_run

    dry_run(settings, Console(), lambda line: None)
    raise SystemExit(0)
