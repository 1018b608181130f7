"""The flags for the generation of an answer, for all commands that have them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Annotated, Any, Final, cast

import typer

from kvpool.client.options import GenerateOptions
from kvpool.protocol.sampling import SAMPLING_OPTIONS, SamplingOption

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


def _flag(name: str, kind: Any, help: str, default: Any = None, *, flag: str = "", **more: Any) -> inspect.Parameter:
    """Return the parameter of a command for one option. Its flag is the option's name unless `flag` is another one."""
    option = typer.Option(flag or f"--{name.replace('_', '-')}", help=help, **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default)


def _sampling_flag(name: str, option: SamplingOption) -> inspect.Parameter:
    if name == "logit_bias":
        return _flag(name, list[str] | None, option.help, metavar="ID=BIAS")
    if name == "seed":
        return _flag(name, int | None, option.help)
    if not option.is_of_files:
        return _flag(name, type(option.default), option.help, option.default)
    return _flag(name, type(option.default) | None, option.help, show_default=f"{_MODELS}{option.default:g}")


FLAGS: Final = (
    _flag("max_tokens", int, "Tokens to generate at most.", 128, min=1),
    *(_sampling_flag(name, option) for name, option in SAMPLING_OPTIONS.items() if option.help),
    _flag("n", int, "Answers to one prompt; answer k draws with seed + k.", 1, min=1),
    _flag(
        "num_beams",
        int | None,
        "Beam search: follow so many texts and return the n best ones.",
        min=1,
        show_default=_MODELS + "1",
    ),
    _flag("length_penalty", float | None, "With beams: above 0 favours long texts.", show_default="1"),
    _flag(
        "early_stopping",
        EarlyStoppingWord | None,
        "With beams: end as soon as there are as many texts, or never before none can be better.",
        show_default="false",
    ),
    _flag("stop", list[str] | None, "String that ends the text; may be repeated."),
    _flag(
        "stop_token_ids",
        list[int] | None,
        "Id that ends the text; may be repeated.",
        flag="--stop-token-id",
        metavar="ID",
    ),
    _flag("min_tokens", int | None, "The text has at least this many tokens.", min=0, show_default=_MODELS + "0"),
    _flag("ignore_eos", bool, "Continue after end-of-text ids.", False, flag="--ignore-eos"),
    _flag("echo", bool, "Begin the text with the prompt.", False),
    _flag("logprobs", int | None, "With --json: of the tokens, and of the n most likely ones.", metavar="N"),
    _flag("prompt_logprobs", int | None, "With --json: the same of the prompt's tokens.", metavar="N"),
    inspect.Parameter("priority", inspect.Parameter.KEYWORD_ONLY, annotation=Priority, default=0),
    inspect.Parameter("tenant", inspect.Parameter.KEYWORD_ONLY, annotation=Tenant, default=""),
    inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, annotation=ModelName, default=None),
    _flag("tenant_salt", str, "Other salts never share blocks.", ""),
    _flag("timeout", float | None, "Seconds until the last token.", show_default="600"),
)
"""Parameter of a command for each option, by the names of GenerateOptions, in the order of --help."""


def takes_answer_flags(
    *, without: Collection[str] = (), **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `options` by the flags; it then gets their values. `without`: options for which the command has
    no flag. `defaults`: the command's own defaults."""
    flags = [flag.replace(default=defaults.get(flag.name, flag.default)) for flag in FLAGS if flag.name not in without]

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
