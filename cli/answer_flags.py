"""The flags for the generation of an answer, for all commands that have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Annotated, Any, cast, get_type_hints

import typer

from kvpool.client.options import GenerateOptions

Priority = Annotated[
    int,
    typer.Option(
        "--priority",
        metavar="N",
        help="Smaller is served earlier, and preempted later, by workers with --scheduling-policy priority.",
    ),
]
Tenant = Annotated[
    str,
    typer.Option("--tenant", metavar="NAME", help="On whose behalf; workers share their steps fairly between tenants."),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Name or fingerprint, where workers serve several models.")
]


_MODELS = "the model's own, or "


class EarlyStoppingWord(StrEnum):
    """The values of the option early_stopping, as words."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"

    @property
    def value_of_option(self) -> bool | str:
        return self.value if self is EarlyStoppingWord.NEVER else self is EarlyStoppingWord.TRUE


class AnswerFlags:
    """Type, flag and default of each option. The names are those of GenerateOptions, the order is that of --help."""

    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")] = 128
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0: always the most likely token.", show_default=_MODELS + "0")
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep the k most likely tokens; 0: all.", show_default=_MODELS + "0")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Keep the most likely tokens up to this probability.", show_default=_MODELS + "1"),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Drop tokens less likely than this share of the most likely one.",
            show_default=_MODELS + "0",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            help="Above 1: what prompt or answer holds becomes less likely.",
            show_default=_MODELS + "1",
        ),
    ] = None
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Taken off the logits of what the answer holds.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Taken off for each time that the answer holds it.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to the logit of a token id; may be repeated."),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text. Default: a random one.")] = None
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to one prompt; answer k draws with seed + k.")] = 1
    num_beams: Annotated[
        int | None,
        typer.Option(
            "--num-beams",
            min=1,
            help="Beam search: follow so many texts and return the n best ones.",
            show_default=_MODELS + "1",
        ),
    ] = None
    length_penalty: Annotated[
        float | None,
        typer.Option("--length-penalty", help="With beams: above 0 favours long texts.", show_default="1"),
    ] = None
    early_stopping: Annotated[
        EarlyStoppingWord | None,
        typer.Option(
            "--early-stopping",
            help="With beams: end as soon as there are as many texts, or never before none can be better.",
            show_default="false",
        ),
    ] = None
    stop: Annotated[list[str] | None, typer.Option("--stop", help="String that ends the text; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="Id that ends the text; may be repeated.")
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option("--min-tokens", min=0, help="The text has at least this many tokens.", show_default=_MODELS + "0"),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None,
        typer.Option(
            "--no-repeat-ngram-size",
            metavar="N",
            min=0,
            help="No run of N tokens occurs twice, in prompt and answer; 0: any may.",
            show_default=_MODELS + "0",
        ),
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-text ids.")] = False
    echo: Annotated[bool, typer.Option("--echo", help="Begin the text with the prompt.")] = False
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", metavar="N", help="With --json: of the tokens, and of the n most likely ones."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option("--prompt-logprobs", metavar="N", help="With --json: the same of the prompt's tokens.")
    ] = None
    priority: Priority = 0
    tenant: Tenant = ""
    model: ModelName = None
    tenant_salt: Annotated[str, typer.Option("--tenant-salt", help="Other salts never share blocks.")] = ""
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds until the last token.", show_default="600")
    ] = None


def takes_answer_flags(
    *, without: Collection[str] = (), **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `options` by the flags; it then gets their values. `without`: options for which the command has
    no flag. `defaults`: the command's own defaults."""
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=annotation,
            default=defaults.get(name, getattr(AnswerFlags, name)),
        )
        for name, annotation in get_type_hints(AnswerFlags, include_extras=True).items()
        if name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            options = {flag.name: given.pop(flag.name) for flag in flags}
            options["logit_bias"] = parse_logit_bias(options["logit_bias"] or ())
            if options["early_stopping"] is not None:
                options["early_stopping"] = options["early_stopping"].value_of_option
            command(options=cast(GenerateOptions, options), **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            parameters += flags if parameter.name == "options" else own
        # typer reads these attributes of a command.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    """Parse `ID=BIAS` pairs; the last one counts if an id is named twice."""
    bias: dict[int, float] = {}
    for pair in pairs:
        token_id, _, value = pair.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise typer.BadParameter(
                f"{pair!r} is no token id and bias, as in 1042=-5.5", param_hint="--logit-bias"
            ) from None
    return bias
