"""`kvpool explain`: why a prompt is not served from the cache."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvpool.client.messages import Message
from kvpool.client.sync_client import SyncClient
from kvpool.process.printable import printable

from ..answer_flags import ModelName
from ..terminal import JsonOption, ManagerOption, client_config, print_json


def explain(
    text: Annotated[str, typer.Argument(help="The prompt, raw: no chat template. `-` reads it from stdin.")],
    as_chat: Annotated[bool, typer.Option("--chat", help="It is a chat's first message.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what the model is to be.")] = None,
    worker: Annotated[str, typer.Option(help="Of this worker alone.")] = "",
    model: ModelName = None,
    tenant_salt: Annotated[str, typer.Option(help="Other salts never share blocks.")] = "",
    as_json: JsonOption = False,
    manager: ManagerOption = None,
) -> None:
    """Say how much of a prompt the cache would serve now, and why no more. Changes nothing."""
    if system is not None and not as_chat:
        raise typer.BadParameter("a raw prompt has no system message: give --chat as well", param_hint="--system")
    prompt = sys.stdin.read() if text == "-" else text
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = [*start, {"role": "user", "content": prompt}] if as_chat else None
    with SyncClient(config=client_config(manager)) as client:
        explanation = client.explain(
            None if as_chat else prompt, messages=messages, model=model, tenant_salt=tenant_salt, worker_id=worker
        )
        sentences = explanation.sentences(client.model(model).tokenizer)
    if as_json:
        print_json({**explanation.as_object(), "sentences": sentences})
        return
    for sentence in sentences:
        typer.echo(printable(sentence))
