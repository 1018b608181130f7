"""Whether a token is what the model says there, by transformers in float32, and how far from it a wrong one is.

The last bits of a logit are not those of transformers, which adds up in another order. Where the decision hangs on those bits (two
logits, or the draw and its edge, within TIE of each other) either token is right: a tie. Anything else is a violation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.live.workload import TEMPERATURE, TOP_P, Request
from tests.model.sampling_oracle import uniform

TIE: Final = 1e-4


@dataclass(frozen=True)
class Doubt:
    """A token that is not the oracle's own choice."""

    request: int
    index: int
    """Of the token in the answer."""
    distance: float
    """Greedy: between the best logit and the token's. Drawn: between the number drawn, in [0, 1), and the token's interval, or
    between top_p and the sum that decides whether the token is kept."""

    @property
    def is_tie(self) -> bool:
        return self.distance <= TIE

    def __str__(self) -> str:
        return f"request {self.request}, token {self.index}: {self.distance:.2g} from the choice"


class Judge:
    """The model in float32, asked about whole answers with one forward pass each."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()

    @classmethod
    def of(cls, path: Path) -> Self:
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    def doubts(self, request: Request, tokens: Sequence[int]) -> list[Doubt]:
        """All tokens of an answer, complete or not, that are not the choice behind the tokens before them."""
        if not tokens:
            return []
        num_prompt = len(request.prompt)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*request.prompt, *tokens[:-1]]])).logits[0, num_prompt - 1 :]
        found = []
        for index, token in enumerate(tokens):
            if request.seed is None:
                distance = float(logits[index].max() - logits[index, token])
            else:
                distance = draw_distance(logits[index], token, uniform(request.seed, num_prompt + index))
            if distance > 0:
                found.append(Doubt(request.number, index, distance))
        return found


def draw_distance(logits: torch.Tensor, token: int, number: float) -> float:
    """How far `number` in [0, 1) is from drawing `token` out of logits [vocab_size]; 0: it draws that one."""
    probabilities = torch.softmax(logits.double() / TEMPERATURE, dim=-1)
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    sums = torch.cumsum(ordered, dim=0)
    # As few as sum to top_p; beside that, what would be kept if the sum at the edge were a little smaller or larger.
    num_kept = int((sums < TOP_P).sum()) + 1
    return min(
        max(_off_cut(sums, count), _off_interval(probabilities, ids[:count], token, number))
        for count in (num_kept, num_kept - 1, num_kept + 1)
        if 0 < count <= len(ids)
    )


def _off_cut(sums: torch.Tensor, count: int) -> float:
    """How much the sums would have to differ for `count` tokens to be kept."""
    too_few = TOP_P - float(sums[count - 1])
    too_many = float(sums[count - 2]) - TOP_P if count > 1 else 0.0
    return max(0.0, too_few, too_many)


def _off_interval(probabilities: torch.Tensor, kept: torch.Tensor, token: int, number: float) -> float:
    """How far the number is from the token's interval, the kept tokens lying side by side in the order of their ids."""
    weights = torch.zeros_like(probabilities)
    weights[kept] = probabilities[kept]
    if not weights[token]:
        return 1.0
    edges = torch.cumsum(weights / weights.sum(), dim=0)
    above = float(edges[token])
    below = float(edges[token - 1]) if token else 0.0
    return max(0.0, below - number, number - above)
