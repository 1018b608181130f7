"""docs/MODELS.md: written from outcomes, and read back for its own consistency."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from .outcome import NATIVE, Outcome, Result

PATH = Path(__file__).parents[2] / "docs" / "MODELS.md"

_INTRODUCTION = """\
# Which models run

Every type with a causal language model in `transformers`, tried as a tiny random model; written by `make models`, not by hand.

* **runs**: load_model accepts it, and over the paged pool it equals transformers' `generate` with eager attention in float32: the
  same greedy tokens, and log-probabilities equal to within {tolerance:g} of the logits' standard deviation. Prompts are shorter and
  longer than every window, packed together, whole and in chunks, prefill is mixed with decode, and blocks are in random order.
  With recurrent layers they are run again from states that were kept in the middle of the prompt, and again from the beginning with
  half of the generated tokens, as after a preemption.
* **native**: the native step of a CPU recognises it, and equals `generate` in the same way. Other types run with torch: among
  them all with recurrent layers, which run with transformers' modules.
* **refused**: load_model refuses it before it reads weights, for the given reason: by the config, by the way in which layers call
  attention, or because a tiny model of the same kind computes other logits; never by a list of names.
* **not built here**: transformers cannot build or run the type in this environment.
* **WRONG**: accepted, with a wrong result. There must be none; the script then fails.

Each type is tried with its default config and small sizes; `+longrope` is the type with the RoPE of Phi-3.5 and Phi-4-mini. Such a
model runs up to its original length (4,096 tokens), which is its default `--max-model-len`. With a larger one, the factors for long
texts apply to all, so texts up to the original length differ from `generate`; this page does not call that "runs".

A checkpoint with other settings is checked in the same way when it is loaded: some of a type that runs may be refused, for example
with `dynamic` RoPE beyond the original length, and some of a type that is refused may run.
"""


class Summary(NamedTuple):
    """The document's own statements."""

    transformers: str
    torch: str
    counts: dict[str, int]
    """By result, as stated."""
    table: dict[str, str]
    """Result by type."""


def write(outcomes: Sequence[Outcome], tolerance: float) -> None:
    """Write the document."""
    PATH.write_text(render(outcomes, tolerance), encoding="utf-8")


def render(outcomes: Sequence[Outcome], tolerance: float) -> str:
    """The document's text."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.kind)
    counts = Counter(outcome.result for outcome in ordered)
    lines = [
        _INTRODUCTION.format(tolerance=tolerance),
        f"transformers {transformers.__version__}, torch {_torch_version()}, {len(ordered)} types:\n",
        "| result | types |",
        "|---|---|",
        *(f"| {result.value} | {counts[result]} |" for result in Result),
        "",
        f"Of those that run, {sum(outcome.native == NATIVE for outcome in ordered)} run natively on a CPU.",
        "",
        "## Why types are refused\n",
        "| reason | types |",
        "|---|---|",
        *(f"| {_cell(reason)} | {', '.join(kinds)} |" for reason, kinds in _grouped(ordered)),
        "",
        "## Why types that run do not run natively\n",
        "| reason | types |",
        "|---|---|",
        *(f"| {_cell(reason)} | {', '.join(kinds)} |" for reason, kinds in _not_native(ordered)),
        "",
        "## All types\n",
        "| type | result | native | |",
        "|---|---|---|---|",
        *(
            f"| {outcome.kind} | {outcome.result.value} | {'yes' if outcome.native == NATIVE else ''} | {_cell(_remark(outcome))} |"
            for outcome in ordered
        ),
    ]
    return "\n".join(lines) + "\n"


def read(text: str) -> Summary:
    """Raises ValueError for a text that `render` did not make."""
    versions = re.search(r"^transformers (\S+), torch (\S+), (\d+) types:$", text, re.MULTILINE)
    if versions is None:
        raise ValueError("no line of versions")
    counts = {name: int(count) for name, count in re.findall(r"^\| ([\w ]+) \| (\d+) \|$", text, re.MULTILINE)}
    results = "|".join(result.value for result in Result)
    table = dict(re.findall(rf"^\| (\S+) \| ({results}) \| .*\|$", text.partition("## All types")[2], re.MULTILINE))
    return Summary(versions[1], versions[2], counts, table)


def _torch_version() -> str:
    return str(torch.__version__).partition("+")[0]


def _grouped(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str]]]:
    """Reasons without details of a single type, the most common first."""
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result is Result.REFUSED:
            groups.setdefault(_general(outcome), []).append(outcome.kind)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def _not_native(outcomes: Sequence[Outcome]) -> list[tuple[str, list[str]]]:
    """Reasons without figures and names of weights, the most common first."""
    groups: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.native not in ("", NATIVE):
            reason = re.sub(r"\d+(\.\d+)?%", "x %", outcome.native)
            groups.setdefault(re.sub(r", such as \S+$", "", reason), []).append(outcome.kind)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def _general(outcome: Outcome) -> str:
    reason = re.sub(rf"^{re.escape(outcome.kind)} ", "", outcome.reason)
    reason = reason.removeprefix("cannot be served, according to a tiny model of its kind: ")
    reason = re.sub(r"^\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|WithLMHead|Decoder) ", "", reason)
    reason = re.sub(r"has layers of type [\w, ]+; only", "has layers of other types; only", reason)
    reason = re.sub(r"has \d+ layers with a state, but \d+ of them", "has layers with a state that", reason)
    reason = re.sub(r"\d+(\.\d+)?%", "x %", reason)
    reason = re.sub(r"its module \S+ ", "a module ", reason)
    return re.sub(r"has \d+ layers, but \d+ of them reach", "has layers that do not reach", reason)


def _remark(outcome: Outcome) -> str:
    return "" if outcome.result is Result.REFUSED and len(outcome.reason) > 400 else outcome.reason


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
