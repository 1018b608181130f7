"""The flags that say how an answer is to be made; `generate` and `chat` share them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0: always the most likely token.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k most likely tokens; 0: all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this probability.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens less likely than this share of the most likely one.")]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1: what prompt or answer holds becomes less likely.")
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="Taken off the logits of what the answer holds.")
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="Taken off for each time that the answer holds it.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to the logit of a token id; may be repeated."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same text. Default: a random one.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends the text; may be repeated.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="Id that ends the text; may be repeated.")
]
MinTokens = Annotated[int, typer.Option("--min-tokens", min=0, help="Fewest tokens before anything ends the text.")]
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
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds until the last token.", show_default="600")]


def parse_logit_bias(pairs: Iterable[str]) -> dict[int, float]:
    """`ID=BIAS` for each token id; the last one counts where an id is named twice."""
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
