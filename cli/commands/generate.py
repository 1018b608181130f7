"""`kvpool generate`: continue a raw prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from kvpool.client.chunk import TokenLogprobs
from kvpool.client.completion import Completion
from kvpool.client.options import GenerateOptions
from kvpool.client.sync_client import SyncClient

from ..answer_flags import takes_answer_flags
from ..terminal import JsonOption, ManagerOption, client_config, print_answer, print_json


@takes_answer_flags()
def generate(
    text: Annotated[str, typer.Argument(help="The prompt, raw: no chat template. `-` reads it from stdin.")],
    *,
    options: GenerateOptions,
    as_json: JsonOption = False,
    manager: ManagerOption = None,
) -> None:
    """Continue a text; it streams to stdout. Several answers come when all have ended, one after the other."""
    if not as_json and (options["logprobs"], options["prompt_logprobs"]) != (None, None):
        raise typer.BadParameter("they are no part of the text: give --json as well", param_hint="--logprobs")
    prompt = sys.stdin.read() if text == "-" else text
    with SyncClient(config=client_config(manager)) as client, client.generate(prompt, **options) as stream:
        if as_json:
            for completion in stream.collect_all():
                print_json(completion_object(completion))
        elif options["n"] == 1:
            for chunk in stream:
                print_answer(chunk.text)
            print()
        else:
            for number, completion in enumerate(stream.collect_all(), 1):
                print(f"[{number} of {options['n']}]")
                print_answer(completion.text)
                print()


def completion_object(completion: Completion) -> dict[str, object]:
    """Return the object that `--json` prints, on a line for each answer. The names are part of the interface. Log-probabilities are
    in it only if they were asked for, a score only for a beam search."""
    fields: dict[str, object] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "worker_id": completion.worker_id,
        "num_attempts": completion.num_attempts,
        "num_preemptions": completion.num_preemptions,
        "time_to_first_token_ms": round(completion.time_to_first_token_ms, 3),
        "times": None if completion.times is None else asdict(completion.times),
    }
    if completion.score is not None:
        fields["score"] = completion.score
    if completion.logprobs is not None:
        fields["logprobs"] = [_logprobs_object(entry) for entry in completion.logprobs]
    if completion.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [entry and _logprobs_object(entry) for entry in completion.prompt_logprobs]
    return fields


def _logprobs_object(logprobs: TokenLogprobs) -> dict[str, object]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in logprobs.top]
    return {"logprob": logprobs.logprob, "top": top}
