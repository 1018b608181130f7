"""docs/MODELS.md: written from outcomes, and read back for its own consistency."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from kvpool.worker_service.model.generation import FIELDS, Use

from .outcome import NATIVE, Outcome, Result
from .published import PUBLISHED
from .subjects import COMPOSITE, SEQ2SEQ

PATH = Path(__file__).parents[2] / "docs" / "MODELS.md"

_INTRODUCTION = """\
# Which models run

Every type with a language model in `transformers`, tried as a tiny random model: causal models, encoder-decoder models, models that
read images or sound too, and then configs of the models that are used most. Written by `make prove KIND=models`, not by hand.

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


_FILES = """\
## Files

A model is a folder with config.json and safetensors, or one GGUF file. It is served as its files say, or refused in one sentence
that names the file and what to do; a worker prints it and exits with status 1.

* **Weights are whole.** Every parameter and persistent buffer has a tensor in the checkpoint, is tied to one that has, or is a
  table that the model computes, such as sinusoidal positions. Otherwise the model is refused, and the first three tensors that
  are missing, or of another shape, are named. Tensors that the model does not use are listed in the log and harm nothing:
  frequencies of RoPE in old checkpoints, parts for images, layers that predict several tokens ahead. A checkpoint of the bare
  model, whose names have no prefix, loads too.
* **Pickled weights** are refused: they can run code.
* **Quantized checkpoints** (GPTQ, AWQ, compressed-tensors, bitsandbytes, fp8, mxfp4 and all others with a `quantization_config`,
  or with weights in 8 bits and less) are refused by the name of the quantizer. Serve the model that was quantized, or a GGUF file
  of it; `--quantize int8` makes its weights smaller when it is loaded.
* **A GGUF file** is converted once to float32, float16 or bfloat16, the smallest that keeps all its matrices exactly; bfloat16 if
  they are quantized. Its header becomes the config: sizes, epsilons, windows, soft caps, experts, and RoPE with its base, scaling
  (linear, yarn, longrope) and the factors of `rope_freqs`. A key or tensor that changes the computation and has no place in the
  config of transformers is refused by its name, as is a file that is one part of several (`split.count`): `llama-gguf-split
  --merge` joins them.
* **Broken files**: pointers of git-lfs, cut or empty files, folders in the place of files, JSON that is none or has something
  else where a number belongs. The small ones are checked before `kvpool up` starts a worker.
"""


_SEQ2SEQ_HEADING = "## Encoder-decoder models"
_SEQ2SEQ_INTRODUCTION = """\
The prompt feeds the encoder, and the text is the decoder's. A type runs if the decoder over the paged pool equals `generate` as
above: over encoder inputs of different lengths in one row, from decoder prompts whole and in chunks, and with the KV of an encoder
input that the blocks hold already. Transformers' modules run all of them, with the torch backend; the native step computes none.
They are refused by the config, by the way in which layers call attention, or by what a tiny model of the kind computes. Models of
speech and images are no encoder-decoder models of texts.
"""


_COMPOSITE_HEADING = "## Models that read images or sound too"
_COMPOSITE_INTRODUCTION = """\
Other types that `transformers` has for text together with images, video or sound. Their texts are served: the language model alone
is loaded, from the weights that the model is published with. A type runs if texts equal those of `generate` by the whole model.
Images and sound in a request are refused by name. Some types of the first table are such models too, tried and served in the same
way.
"""
_PUBLISHED_HEADING = "## Models as published"
_PUBLISHED_INTRODUCTION = """\
Models that are used most, each with what its config.json states and its type's default does not. The config in its own size has to
be accepted; then a random model of it is tried as above, with all its sizes divided by one number, or as small as those of the
other tables. It may have fewer layers and experts.
"""


_GENERATION = """\
## What generation_config.json asks for

`generate` takes options from this file, and from config.json where there is none. So does a worker: a request that says nothing
gets the text of `generate` with the files as shipped, in greedy float32 token by token, beam search included. Three things differ.
Without `max_new_tokens` and `max_length` a text may fill the model, where `generate` ends after 20 tokens. A file without an
`eos_token_id` has that of config.json, where `generate` continues. And a stop string is not part of the text.

Texts end at the file's `eos_token_id`, or else at the one that config.json states; a default of the config's class ends nothing. In
chats the tokenizer's `eos_token` or `eot_token` ends them too; a GGUF file's `eot_token_id` ends all texts. The log lists these ids
at load, and those outside the vocabulary, which are ignored.

Every field of transformers' GenerationConfig is in one of these tables. The log at load names those that a file has.

"""


class Part(NamedTuple):
    """What the document states of one kind of models."""

    counts: dict[str, int]
    """By result, as stated."""
    table: dict[str, str]
    """Result by type."""


class Summary(NamedTuple):
    """The document's own statements."""

    transformers: str
    torch: str
    causal: Part
    seq2seq: Part
    composite: Part
    published: Part
    """Types without the prefix of their trials."""


def write(outcomes: Sequence[Outcome], tolerance: float) -> None:
    """Write the document."""
    PATH.write_text(render(outcomes, tolerance), encoding="utf-8")


def render(outcomes: Sequence[Outcome], tolerance: float) -> str:
    """The document's text."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.kind)
    seq2seq, composite, published = (_with_prefix(ordered, prefix) for prefix in (SEQ2SEQ, COMPOSITE, PUBLISHED))
    causal = [outcome for outcome in ordered if not outcome.kind.startswith((SEQ2SEQ, COMPOSITE, PUBLISHED))]
    lines = [
        _INTRODUCTION.format(tolerance=tolerance),
        f"transformers {transformers.__version__}, torch {_torch_version()}, {len(causal)} types of causal models:\n",
        *_counts(causal),
        "",
        f"Of those that run, {sum(outcome.native == NATIVE for outcome in causal)} run natively on a CPU.",
        "",
        _FILES,
        "## Why types are refused\n",
        *_reasons(_grouped(causal)),
        "",
        "## Why types that run do not run natively\n",
        *_reasons(_not_native(causal)),
        "",
        "## All types\n",
        *_table("type", causal),
        "",
        f"{_SEQ2SEQ_HEADING}\n",
        _SEQ2SEQ_INTRODUCTION,
        f"{len(seq2seq)} types:\n",
        *_counts(seq2seq),
        "",
        "| reason for which types are refused | types |",
        "|---|---|",
        *_reasons(_grouped(seq2seq))[2:],
        "",
        "| type | result | |",
        "|---|---|---|",
        *(f"| {outcome.kind} | {outcome.result.value} | {_cell(_remark(outcome))} |" for outcome in seq2seq),
        "",
        f"{_COMPOSITE_HEADING}\n",
        _COMPOSITE_INTRODUCTION,
        f"{len(composite)} types:\n",
        *_counts(composite),
        "",
        *_table("type", composite),
        "",
        f"{_PUBLISHED_HEADING}\n",
        _PUBLISHED_INTRODUCTION,
        f"{len(published)} models:\n",
        *_counts(published),
        "",
        *_table("model", published),
        "",
        generation(),
    ]
    return "\n".join(lines)


def generation() -> str:
    """The part on generation_config.json."""
    tables = (
        ("a default of requests", "overridden with", {Use.DEFAULT}),
        ("begins or ends texts", "how", {Use.IDS}),
        ("without effect", "why", {Use.NOTHING}),
        ("refused if the file asks to sample, else without effect", "why", {Use.WHILE_SAMPLING}),
        ("refused, if it asks for anything", "what is not there", {Use.REFUSED}),
    )
    lines: list[str] = []
    for title, column, uses in tables:
        reasons: dict[str, list[str]] = {}
        for name, field in FIELDS.items():
            if field.use in uses:
                reasons.setdefault(field.why, []).append(f"`{name}`")
        lines += [f"| {title} | {column} |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {_cell(why)} |" for why, names in reasons.items()] + [""]
    return _GENERATION + "\n".join(lines)


def _with_prefix(outcomes: Sequence[Outcome], prefix: str) -> list[Outcome]:
    """The outcomes of types with the prefix, which is left out."""
    return [
        replace(outcome, kind=outcome.kind.removeprefix(prefix))
        for outcome in outcomes
        if outcome.kind.startswith(prefix)
    ]


def _table(what: str, outcomes: Sequence[Outcome]) -> list[str]:
    return [
        f"| {what} | result | native | |",
        "|---|---|---|---|",
        *(
            f"| {outcome.kind} | {outcome.result.value} | {'yes' if outcome.native == NATIVE else ''} | {_cell(_remark(outcome))} |"
            for outcome in outcomes
        ),
    ]


def _counts(outcomes: Sequence[Outcome]) -> list[str]:
    counts = Counter(outcome.result for outcome in outcomes)
    return ["| result | types |", "|---|---|", *(f"| {result.value} | {counts[result]} |" for result in Result)]


def _reasons(grouped: Sequence[tuple[str, list[str]]]) -> list[str]:
    return [
        "| reason | types |",
        "|---|---|",
        *(f"| {_cell(reason)} | {', '.join(kinds)} |" for reason, kinds in grouped),
    ]


def read(text: str) -> Summary:
    """Raises ValueError for a text that `render` did not make."""
    versions = re.search(r"^transformers (\S+), torch (\S+), (\d+) types of causal models:$", text, re.MULTILINE)
    if versions is None:
        raise ValueError("no line of versions")
    headings = "|".join(re.escape(one) for one in (_SEQ2SEQ_HEADING, _COMPOSITE_HEADING, _PUBLISHED_HEADING))
    types, _, _ = text.partition("## What generation_config.json")
    return Summary(versions[1], versions[2], *map(_read_part, re.split(f"^(?:{headings})$", types, flags=re.MULTILINE)))


def _read_part(text: str) -> Part:
    counts = {name: int(count) for name, count in re.findall(r"^\| ([\w ]+) \| (\d+) \|$", text, re.MULTILINE)}
    results = "|".join(result.value for result in Result)
    return Part(counts, dict(re.findall(rf"^\| (\S[^|]*) \| ({results}) \| .*\|$", text, re.MULTILINE)))


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
    reason = re.sub(
        r"^\w+(ForCausalLM|ForConditionalGeneration|ForTextToText|LMHeadModel|WithLMHead|Decoder) ", "", reason
    )
    reason = re.sub(r"has layers of type [\w, ]+; only", "has layers of other types; only", reason)
    reason = re.sub(r"has \d+ layers with a state, but \d+ of them", "has layers with a state that", reason)
    reason = re.sub(r"\d+(\.\d+)?%", "x %", reason)
    reason = re.sub(r" for '[\w-]+'\.$", " for the type.", reason)
    reason = re.sub(r"its module \S+ ", "a module ", reason)
    return re.sub(r"has \d+ layers, but \d+ of them reach", "has layers that do not reach", reason)


def _remark(outcome: Outcome) -> str:
    return "" if outcome.result is Result.REFUSED and len(outcome.reason) > 400 else outcome.reason


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
