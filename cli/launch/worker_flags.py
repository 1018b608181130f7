"""Splits the flags of a command that starts a cluster into its own and those of its workers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvpool.process.services import MANAGER_MODULE, WORKER_MODULE, become, service_command
from kvpool.process.settings import (
    ProcessSettings,
    SettingsProblem,
    flags_in,
    flags_of,
    load_settings,
    split_flags,
    unknown_flag,
)

from .trial import WorkerRefused

S = TypeVar("S", bound=ProcessSettings)


@dataclass(frozen=True, slots=True)
class WorkerFlags(Generic[S]):
    command: str
    """Name of the command in messages, e.g. "kvpool up"."""
    settings: type[S]
    """Class of the command's own settings."""
    refused: Mapping[str, str]
    """Flags of a worker that the command sets itself, and what to do instead."""

    def load(self, arguments: Sequence[str]) -> tuple[S, list[str]]:
        """Return the settings of the command, and the arguments of its workers. With --help among the latter the process becomes a
        worker that shows its help. Raises SettingsProblem."""
        own, of_workers = self.split(arguments)
        if {"--help", "-h"} & set(of_workers):
            become(service_command(WORKER_MODULE, ["--help"]))
        return load_settings(self.settings, own), of_workers

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the arguments of the command, and those of its workers. Raises SettingsProblem for a worker's flag that the
        command sets itself."""
        end = arguments.index("--") if "--" in arguments else len(arguments)
        before = split_flags(self.settings, arguments[:end])
        after = split_flags(self.settings, arguments[end + 1 :], without=("--port", "--help", "-h"))
        of_workers = [*before.others, *after.others]
        for flag in flags_in(of_workers):
            if flag in self.refused:
                raise SettingsProblem(f"{self.command} sets {flag} of its workers: {self.refused[flag]}")
        return [*before.own, *after.own], of_workers

    def say_refusal(self, refused: WorkerRefused, arguments: Sequence[str]) -> list[str]:
        """Return the lines to print when a worker has refused these arguments: an explanation of unknown flags, or else the
        worker's own lines. Takes a second."""
        lines = self._explain(arguments) if refused.exit_status == 2 else []
        return [f"{self.command}: {line}" for line in lines] or refused.lines

    def _explain(self, arguments: Sequence[str]) -> list[str]:
        """Return a line for each flag that neither the command nor a worker has. Runs the services with --help."""
        of_worker = _flags_of(WORKER_MODULE)
        unknown = [flag for flag in flags_in(arguments) if flag not in of_worker]
        of_manager = _flags_of(MANAGER_MODULE) if unknown else set()
        lines = []
        for flag in unknown:
            if flag in of_manager:
                field = flag.removeprefix("--").replace("-", "_")
                lines.append(
                    f"{flag} is a flag of the manager: set KVPOOL_MANAGER_{field.upper()}, or {field} in [manager] of the file "
                    "that --config names"
                )
            else:
                lines.append(unknown_flag(flag, of_worker - self.refused.keys() | flags_of(self.settings)))
        return lines


def _flags_of(module: str) -> set[str]:
    help_text = subprocess.run(service_command(module, ["--help"]), capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"--[a-z][a-z-]*", help_text))
