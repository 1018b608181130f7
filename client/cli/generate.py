"""`kvpool generate`: continue a raw prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ..completion import Completion
from ..options import GenerateOptions
from ..sync_client import SyncClient
from .terminal import JsonOption, ManagerOption, client_config

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0: always the most likely token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0: all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this probability.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text. Default: a random one.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends the text; may be repeated.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Name or fingerprint, where workers serve several models.")
]
Priority = Annotated[int, typer.Option("--priority", help="Smaller is served earlier, where the worker goes by it.")]
Tenant = Annotated[str, typer.Option("--tenant", help="On whose behalf: steps are shared fairly between tenants.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds until the last token.", show_default="600")]


def generate(
    text: Annotated[str, typer.Argument(help="The prompt, raw: no chat template. `-` reads it from stdin.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind end-of-text ids.")] = False,
    model: ModelName = None,
    tenant_salt: Annotated[str, typer.Option("--tenant-salt", help="Other salts never share blocks.")] = "",
    priority: Priority = 0,
    tenant: Tenant = "",
    timeout: Timeout = None,
    as_json: JsonOption = False,
    manager: ManagerOption = None,
) -> None:
    """Continue a text; it streams to stdout."""
    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or (),
        "ignore_eos": ignore_eos,
        "model": model,
        "tenant_salt": tenant_salt,
        "priority": priority,
        "tenant": tenant,
        "timeout": timeout,
    }
    prompt = sys.stdin.read() if text == "-" else text
    with SyncClient(config=client_config(manager)) as client, client.generate(prompt, **options) as stream:
        if as_json:
            print(json.dumps(completion_object(stream.collect())))
            return
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print()


def completion_object(completion: Completion) -> dict[str, object]:
    """What `--json` prints; the names are part of the interface."""
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "worker_id": completion.worker_id,
        "time_to_first_token_ms": round(completion.time_to_first_token_ms, 3),
    }
