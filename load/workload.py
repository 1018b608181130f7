"""Makes workloads: conversations of random tokens, the same for the same seed. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kvpool.client.errors import InvalidRequest

LOG_NORMAL_SIGMA: Final = 0.8
"""Standard deviation of the logarithm of the lengths in `mixed`: half of them are within 0.58 and 1.7 times the median, one in a
hundred is above 6 times."""
MIXED_SHARE: Final = 0.5
"""Share of the prompts in `mixed` that begin with the prefix, of those that are longer than it."""


class LoadWorkload(StrEnum):
    """Workloads, by what their requests have in common."""

    SHARED = "shared"
    """Requests that begin with one prefix, each followed by tokens of its own."""
    UNSHARED = "unshared"
    """Requests that have nothing in common."""
    DOCUMENT = "document"
    """Questions about one long document: like shared, with a prefix that takes most of the time."""
    CHATS = "chats"
    """Conversations: each turn's prompt is all of the conversation so far, the answers included."""
    MIXED = "mixed"
    """Prompts and answers of log-normal length; some prompts begin with one prefix."""


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Lengths in tokens, and turns. Validated when it is made: InvalidRequest."""

    prefix_tokens: int
    """Length of the common part: the prefix, the document, or the beginning of all chats."""
    own_tokens: int
    """Length that each prompt, or each turn of a chat, adds. mixed: mean length of the whole prompt, its prefix included."""
    generated_tokens: int
    """Length of each answer. mixed: its mean."""
    turns: int = 1
    """Turns of each conversation; more than one only in chats."""

    def __post_init__(self) -> None:
        for name, least in (("prefix_tokens", 0), ("own_tokens", 1), ("generated_tokens", 1), ("turns", 1)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} must be at least {least}, got {getattr(self, name)}", reason="BAD_FIELD")


DEFAULT_SIZES: Final[Mapping[LoadWorkload, RequestSizes]] = {
    LoadWorkload.SHARED: RequestSizes(prefix_tokens=512, own_tokens=32, generated_tokens=32),
    LoadWorkload.UNSHARED: RequestSizes(prefix_tokens=0, own_tokens=544, generated_tokens=32),
    LoadWorkload.DOCUMENT: RequestSizes(prefix_tokens=4096, own_tokens=32, generated_tokens=32),
    LoadWorkload.CHATS: RequestSizes(prefix_tokens=0, own_tokens=100, generated_tokens=50, turns=6),
    LoadWorkload.MIXED: RequestSizes(prefix_tokens=128, own_tokens=300, generated_tokens=100),
}
DEFAULT_CONVERSATIONS: Final[Mapping[LoadWorkload, int]] = {
    LoadWorkload.SHARED: 16,
    LoadWorkload.UNSHARED: 16,
    LoadWorkload.DOCUMENT: 8,
    LoadWorkload.CHATS: 8,
    LoadWorkload.MIXED: 64,
}


class ChatTurn(NamedTuple):
    """One request of a conversation."""

    new_tokens: tuple[int, ...]
    """Tokens after the previous answer: the prompt is all earlier prompts and answers, then these."""
    num_generated: int
    """Tokens to generate."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of one user, each sent after the answer to the one before; often there is only one."""

    turns: tuple[ChatTurn, ...]

    @property
    def num_tokens(self) -> int:
        """Length at the end, the last answer included."""
        return sum(len(turn.new_tokens) + turn.num_generated for turn in self.turns)


def make_workload(
    workload: LoadWorkload,
    sizes: RequestSizes,
    num_conversations: int,
    *,
    vocabulary: Sequence[int],
    max_model_len: int,
    seed: int | str,
) -> list[Conversation]:
    """Make conversations of tokens drawn from `vocabulary`. Another seed gives other tokens everywhere, even in the prefix.

    `mixed` cuts texts that are longer than `max_model_len`; in other workloads that is InvalidRequest, and so are sizes that make
    no sense for the workload."""
    require_sense(workload, sizes, num_conversations)
    if not vocabulary:
        raise InvalidRequest("the model has no ordinary tokens to make prompts of", reason="BAD_FIELD")
    generator = random.Random(f"{workload}/{seed}")

    def draw(count: int) -> tuple[int, ...]:
        return tuple(generator.choices(vocabulary, k=count))

    prefix = draw(sizes.prefix_tokens)
    if workload is LoadWorkload.MIXED:
        conversations = [_mixed(generator, draw, prefix, sizes, max_model_len) for _ in range(num_conversations)]
    else:
        conversations = [_even(draw, prefix, sizes) for _ in range(num_conversations)]
    longest = max(conversation.num_tokens for conversation in conversations)
    if longest > max_model_len:
        raise InvalidRequest(
            f"the longest conversation has {longest} tokens with its answers, its workers take {max_model_len}: lower "
            "--prefix-tokens, --own-tokens, --generated-tokens or --turns, or give the workers more blocks or a larger "
            "--max-model-len",
            reason="NEVER_FITS",
        )
    return conversations


def require_sense(workload: LoadWorkload, sizes: RequestSizes, num_conversations: int) -> None:
    """Raise InvalidRequest if the workload cannot have such sizes with any model."""
    if num_conversations < 1:
        raise InvalidRequest(f"needed at least one request, got {num_conversations}", reason="BAD_FIELD")
    if workload is LoadWorkload.UNSHARED and sizes.prefix_tokens:
        raise InvalidRequest(
            f"in unshared nothing is shared, so --prefix-tokens must be 0, got {sizes.prefix_tokens}; use --own-tokens, "
            "or --workload shared",
            reason="BAD_FIELD",
        )
    if workload is not LoadWorkload.CHATS and sizes.turns != 1:
        raise InvalidRequest(
            f"{workload} has one turn, got --turns {sizes.turns}; use --workload chats", reason="BAD_FIELD"
        )


def _even(draw: Callable[[int], tuple[int, ...]], prefix: tuple[int, ...], sizes: RequestSizes) -> Conversation:
    turns = [ChatTurn(draw(sizes.own_tokens), sizes.generated_tokens) for _ in range(sizes.turns)]
    turns[0] = turns[0]._replace(new_tokens=prefix + turns[0].new_tokens)
    return Conversation(tuple(turns))


def _mixed(
    generator: random.Random,
    draw: Callable[[int], tuple[int, ...]],
    prefix: tuple[int, ...],
    sizes: RequestSizes,
    max_model_len: int,
) -> Conversation:
    num_generated = min(_length(generator, sizes.generated_tokens), max_model_len - 1)
    num_prompt = min(_length(generator, sizes.own_tokens), max_model_len - num_generated)
    shares = generator.random() < MIXED_SHARE and num_prompt > len(prefix)
    common = prefix if shares else ()
    return Conversation((ChatTurn(common + draw(num_prompt - len(common)), num_generated),))


def _length(generator: random.Random, mean: int) -> int:
    """Draw a length, at least 1, from a log-normal distribution with this mean: exp(μ + σ² / 2) = mean."""
    mu = math.log(mean) - LOG_NORMAL_SIGMA**2 / 2
    return max(1, round(generator.lognormvariate(mu, LOG_NORMAL_SIGMA)))
