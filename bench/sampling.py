"""CPU time of sampling in a step, by the requests' options.

python -m bench.sampling [--vocabularies 49152,151936] [--rows 1,16,64] [--runs N] [--json [FILE]]

Generated logits: a few likely tokens, of which the first ten have most of the probability, as in texts, and many unlikely ones. One
thread; time of the CPU, not of the clock, so that other programs count little. The least of the runs.
"""

from __future__ import annotations

import random
import time
from typing import Any, Final

import torch
from rich.table import Table

from bench.report import command_line, facts, print_table, progress, report_as
from kvpool.worker_service.model.sampling.adjustment import Draw
from kvpool.worker_service.model.sampling.sampler import sample
from kvpool.worker_service.step import SamplingParams
from kvpool.worker_service.token_counts import TokenCounts

_TEMPERATURE: Final[dict[str, Any]] = {"temperature": 0.8}
_TOP_P: Final = _TEMPERATURE | {"top_p": 0.95}
_TOP_K: Final = _TOP_P | {"top_k": 50}
_MIN_P: Final = _TOP_K | {"min_p": 0.05}
_PENALTIES: Final = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "temperature 0.8": _TEMPERATURE,
    "… and top-p 0.95": _TOP_P,
    "… and top-k 50": _TOP_K,
    "… and min-p 0.05": _MIN_P,
    "… and penalties, 540 tokens": _MIN_P | _PENALTIES,
    "temperature, min-p": _TEMPERATURE | {"min_p": 0.05},
    "greedy, 5 log-probabilities": {"num_logprobs": 5},
    "temperature, top-p, top-k, 5 log-probabilities": _TOP_K | {"num_logprobs": 5},
}
MIXED: Final = "all of these in turn"
_NUM_LIKELY: Final = 20
_NUM_PROMPT_TOKENS: Final = 512
_NUM_GENERATED_TOKENS: Final = 28


def generated_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """[num_rows, vocab_size] float32."""
    numbers = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, vocab_size, generator=numbers) * 2
    logits[:, :_NUM_LIKELY] += torch.linspace(14, 2, _NUM_LIKELY)
    return logits[:, torch.randperm(vocab_size, generator=numbers)].contiguous()


def draws_with(name: str, num_rows: int, vocab_size: int) -> list[Draw]:
    """The draws of a batch with these OPTIONS, or MIXED."""
    numbers, kinds = random.Random(1), list(OPTIONS.values())
    draws = []
    for row in range(num_rows):
        sampling = SamplingParams(seed=row, **(kinds[row % len(kinds)] if name == MIXED else OPTIONS[name]))
        tokens = [numbers.randrange(vocab_size) for _ in range(_NUM_PROMPT_TOKENS + _NUM_GENERATED_TOKENS)]
        counts = TokenCounts(tokens[:_NUM_PROMPT_TOKENS], tokens[_NUM_PROMPT_TOKENS:])
        draws.append(Draw(sampling, len(tokens), counts=counts if sampling.has_penalties else None))
    return draws


def seconds_of(name: str, num_rows: int, vocab_size: int, runs: int) -> float:
    """CPU time of the calling thread in one step."""
    logits, draws = generated_logits(num_rows, vocab_size), draws_with(name, num_rows, vocab_size)
    seconds = []
    with torch.inference_mode():
        for _ in range(runs + 1):
            began = time.thread_time()
            sample(logits, draws)
            seconds.append(time.thread_time() - began)
    return min(seconds[1:])


def _show(found: dict[int, dict[str, list[float]]], rows: list[int]) -> None:
    for vocab_size, of_options in found.items():
        table = Table(f"vocabulary {vocab_size:,}: ms", *(f"{count} rows" for count in rows), box=None)
        for name, seconds in of_options.items():
            table.add_row(name, *(f"{one * 1000:.2f}" for one in seconds))
        print_table(table)


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def main() -> None:
    parser = command_line(__doc__, runs=25, of="runs of each step", json_file=True)
    parser.add_argument("--vocabularies", type=_numbers, default=[49_152, 151_936], metavar="N,N,…")
    parser.add_argument("--rows", type=_numbers, default=[1, 16, 64], metavar="N,N,…")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[int, dict[str, list[float]]] = {}
    for vocab_size in arguments.vocabularies:
        progress(f"vocabulary {vocab_size:,}")
        found[vocab_size] = {
            name: [seconds_of(name, count, vocab_size, arguments.runs) for count in arguments.rows]
            for name in (*OPTIONS, MIXED)
        }
    report_as(
        arguments.json,
        {"seconds": found, "rows": arguments.rows, "facts": facts("torch", "numpy")},
        lambda: _show(found, arguments.rows),
    )


if __name__ == "__main__":
    main()
