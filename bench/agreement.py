"""How far the answers of two sides agree, which shows whether a peer computes the same model. In bfloat16 texts may differ."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple, Self

from kvpool.load.engine import Delivery, EngineUnderLoad, ServedRequest

Answers = Mapping[tuple[int, ...], tuple[int, ...]]
"""Tokens by prompt."""
NUM_FIRST: Final = 8


class Listener:
    """An engine that keeps its answers."""

    def __init__(self, engine: EngineUnderLoad) -> None:
        self._engine = engine
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        """The complete ones."""

    async def served(self) -> ServedRequest:
        """See Engine."""
        return await self._engine.served()

    async def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        """See Engine."""
        answer: list[int] = []
        async with aclosing(self._engine.generate(prompt, num_tokens)) as deliveries:
            async for delivery in deliveries:
                answer += delivery.token_ids
                yield delivery
        self.answers[tuple(prompt)] = tuple(answer)

    async def close(self) -> None:
        """See Engine."""
        await self._engine.close()


class Agreement(NamedTuple):
    """Of answers to the same prompts."""

    num_prompts: int
    """That both answered. Later turns of a chat may have different prompts: they contain the answers before."""
    num_equal_at_first: int
    """Answers whose first token is equal."""
    num_equal_begins: int
    """Answers whose first NUM_FIRST tokens are equal."""

    @classmethod
    def of(cls, ours: Iterable[Answers], theirs: Iterable[Answers]) -> Self:
        """Of several repetitions, in pairs."""
        pairs = [
            (answer, other[prompt])
            for one, other in zip(ours, theirs, strict=True)
            for prompt, answer in one.items()
            if prompt in other
        ]
        return cls(
            len(pairs),
            sum(answer[:1] == other[:1] for answer, other in pairs),
            sum(answer[:NUM_FIRST] == other[:NUM_FIRST] for answer, other in pairs),
        )

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return self._asdict()

    def __str__(self) -> str:
        return (
            f"first token equal in {self.num_equal_at_first} of {self.num_prompts} answers, the first {NUM_FIRST} in "
            f"{self.num_equal_begins}"
        )
