"""`kvpool generate`: continue a raw prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ...chunk import TokenLogprobs
from ...completion import Completion
from ...options import GenerateOptions
from ...sync_client import SyncClient
from ..answer_flags import (
    FrequencyPenalty,
    LogitBias,
    MaxTokens,
    MinP,
    MinTokens,
    ModelName,
    PresencePenalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    StopTokenIds,
    Temperature,
    Tenant,
    Timeout,
    TopK,
    TopP,
    parse_logit_bias,
)
from ..terminal import JsonOption, ManagerOption, client_config, print_answer, print_json

Logprobs = Annotated[
    int | None,
    typer.Option("--logprobs", metavar="N", help="With --json: of the tokens, and of the n most likely ones."),
]
PromptLogprobs = Annotated[
    int | None, typer.Option("--prompt-logprobs", metavar="N", help="With --json: the same of the prompt's tokens.")
]


def generate(
    text: Annotated[str, typer.Argument(help="The prompt, raw: no chat template. `-` reads it from stdin.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenIds = None,
    min_tokens: MinTokens = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-text ids.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Begin the text with the prompt.")] = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    priority: Priority = 0,
    tenant: Tenant = "",
    model: ModelName = None,
    tenant_salt: Annotated[str, typer.Option("--tenant-salt", help="Other salts never share blocks.")] = "",
    timeout: Timeout = None,
    as_json: JsonOption = False,
    manager: ManagerOption = None,
) -> None:
    """Continue a text; it streams to stdout."""
    if not as_json and (logprobs, prompt_logprobs) != (None, None):
        raise typer.BadParameter("they are no part of the text: give --json as well", param_hint="--logprobs")
    options: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": parse_logit_bias(logit_bias or ()),
        "seed": seed,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "echo": echo,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "priority": priority,
        "tenant": tenant,
        "model": model,
        "tenant_salt": tenant_salt,
        "timeout": timeout,
    }
    prompt = sys.stdin.read() if text == "-" else text
    with SyncClient(config=client_config(manager)) as client, client.generate(prompt, **options) as stream:
        if as_json:
            print_json(completion_object(stream.collect()))
            return
        for chunk in stream:
            print_answer(chunk.text)
        print()


def completion_object(completion: Completion) -> dict[str, object]:
    """What `--json` prints; the names are part of the interface. Log-probabilities only if they were asked for."""
    found: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "worker_id": completion.worker_id,
        "num_attempts": completion.num_attempts,
        "num_preemptions": completion.num_preemptions,
        "time_to_first_token_ms": round(completion.time_to_first_token_ms, 3),
    }
    if completion.logprobs is not None:
        found["logprobs"] = [_logprobs_object(entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        found["prompt_logprobs"] = [entry and _logprobs_object(entry) for entry in completion.prompt_logprobs]
    return found


def _logprobs_object(logprobs: TokenLogprobs) -> dict[str, object]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in logprobs.top]
    return {"logprob": logprobs.logprob, "top": top}
