"""The program `kvpool` with all its commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvpool.client.errors import KvpoolError
from kvpool.process.settings import SettingsProblem
from kvpool.process.version import installed_version

from .commands.bench import bench
from .commands.block_map import blocks
from .commands.chat import chat
from .commands.check import check
from .commands.drain import drain
from .commands.explain import explain
from .commands.generate import generate
from .commands.health import health
from .commands.ray import ray
from .commands.status import status
from .commands.up import up
from .pass_through import PassThrough, service
from .terminal import error_line, replace_what_cannot_be_encoded
from .top.top import top

app = typer.Typer(
    name="kvpool",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"kvpool {installed_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """A paged KV cache for LLM inference, divided into services. Start with `kvpool up`."""


app.command("up", cls=PassThrough, add_help_option=False)(up)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("status")(status)
app.command("top")(top)
app.command("blocks")(blocks)
app.command("explain")(explain)
app.command("check")(check)
app.add_typer(bench, name="bench")
app.add_typer(ray, name="ray")
app.command("health")(health)
app.command("drain")(drain)
for _name, _help in (
    ("manager", "Run a cache manager. All arguments go to it; `kvpool manager --help` lists them."),
    ("worker", "Run a worker. All arguments go to it; `kvpool worker --help` lists them."),
    (
        "gateway",
        "Run a gateway: OpenAI's API and a live page. All arguments go to it; `kvpool gateway --help` lists them.",
    ),
    (
        "walkthrough",
        "See the manager's core at work, one operation at a time, in nine stories: pool, sharing, allocation, prefix, chain, "
        "eviction, window, state, fork.",
    ),
):
    app.command(_name, help=_help, cls=PassThrough, add_help_option=False)(service(_name))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. An error of kvpool gives one line on stderr and exit status 1; wrong settings give a line each and
    2. Ctrl-C gives 130."""
    replace_what_cannot_be_encoded()
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvpool")
    except KvpoolError as error:
        print(error_line(error), file=sys.stderr)
        sys.exit(1)
    except SettingsProblem as problem:
        for line in str(problem).splitlines():
            print(f"kvpool: {line}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has left (| head): say nothing, and keep Python from writing an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
