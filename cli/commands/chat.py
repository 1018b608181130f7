"""`kvpool chat`: talk to the model, with its chat template."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from kvpool.client.completion import Completion
from kvpool.client.errors import KvpoolError
from kvpool.client.messages import Message
from kvpool.client.model import Model
from kvpool.client.options import GenerateOptions
from kvpool.client.sync_client import SyncClient

from ..answer_flags import takes_answer_flags
from ..terminal import ManagerOption, client_config, error_line, print_answer, printed, stderr_console

_HELP: Final = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer"


@takes_answer_flags(
    max_tokens=512,
    without=(
        "n",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "echo",
        "logprobs",
        "prompt_logprobs",
        "tenant_salt",
    ),
)
def chat(
    message: Annotated[str | None, typer.Argument(help="One message. Without it: a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is to be.")] = None,
    *,
    options: GenerateOptions,
    manager: ManagerOption = None,
) -> None:
    """Talk to the model; its answers stream to stdout."""
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    with SyncClient(config=client_config(manager)) as client:
        if message is not None:
            _answer(client, [*start, {"role": "user", "content": message}], options)
        else:
            # Before the first question, so that a missing manager is reported at once.
            served = client.model(options["model"])
            _converse(client, served, start, options)


def _converse(client: SyncClient, model: Model, start: list[Message], options: GenerateOptions) -> None:
    remarks = stderr_console()
    remarks.print(printed(f"{model.name}: {_HELP}"), style="dim")
    if defaults := model.default_options:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        remarks.print(printed(f"{model.name} asks for {shown}; flags override it"), style="dim")
    history = list(start)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/clear":
            history = list(start)
            continue
        if line.startswith("/"):
            remarks.print(_HELP, style="dim", markup=False)
            continue
        question: Message = {"role": "user", "content": line}
        try:
            completion = _answer(client, [*history, question], options)
        except KeyboardInterrupt:
            # Leaving the stream has cancelled the call; the question and half an answer are not remembered.
            print()
            continue
        except KvpoolError as error:
            # Most often a conversation that has outgrown the model: /clear helps, leaving does not.
            print(error_line(error), file=sys.stderr)
            continue
        history += [question, {"role": "assistant", "content": completion.text}]
        remark = (
            f"[{completion.worker_id}: {completion.num_cached_tokens} of {completion.num_prompt_tokens} prompt tokens "
            f"from the cache, first token after {completion.time_to_first_token_ms:.0f} ms]"
        )
        remarks.print(printed(remark), style="dim")


def _answer(client: SyncClient, messages: list[Message], options: GenerateOptions) -> Completion:
    with client.chat(messages, **options) as stream:
        for chunk in stream:
            print_answer(chunk.text)
        print()
        return stream.collect()


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, without empty ones, until Ctrl-D, or Ctrl-C at the prompt."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 — importing it gives input() editing and a history
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line
