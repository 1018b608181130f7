"""Perplexity of SmolLM2-135M-Instruct on a document, in a worker's runner: what a way to compute costs in quality.

python -m bench.perplexity [--document docs/LEARN.md] [--tokens N] [--json]

The document in texts of 1,024 tokens; the perplexity of a way is e^(mean −log p) of all tokens but the first of each text. The
ratio is to the first way, transformers' modules in float32.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final, NamedTuple

import torch
from rich.table import Table
from tokenizers import Tokenizer

from bench.report import command_line, facts, print_table, progress
from kvpool.worker_service.engine.step import SequencePart
from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.memory.plan import MemorySettings
from kvpool.worker_service.model.settings import DTypeName, ModelSettings, QuantizationName, RuntimeName

_LENGTH: Final = 1024
_BLOCK_SIZE: Final = 16


class Way(NamedTuple):
    name: str
    runtime: RuntimeName
    dtype: DTypeName
    quantize: QuantizationName = "none"


WAYS: Final = (
    Way("torch, float32", "torch", "float32"),
    Way("torch, bfloat16", "torch", "bfloat16"),
    Way("native, bfloat16", "native", "bfloat16"),
    Way("native, bfloat16, --quantize int8", "native", "bfloat16", "int8"),
)


def perplexity(way: Way, text: str, max_tokens: int) -> tuple[float, int]:
    """Of the text's first tokens, and how many were predicted."""
    settings = ModelSettings("smollm2", way.dtype, "cpu", runtime=way.runtime, quantize=way.quantize)
    loaded = load_model(settings, progress)
    assert loaded.facts.tokenizer_json is not None
    tokens = Tokenizer.from_buffer(loaded.facts.tokenizer_json).encode(text).ids[:max_tokens]
    num_blocks = 1 + _LENGTH // _BLOCK_SIZE
    backend = loaded.attention_backend("auto", _BLOCK_SIZE, progress)
    plan = loaded.plan(MemorySettings(block_size=_BLOCK_SIZE, num_blocks=num_blocks), backend).kv_cache
    runner = loaded.runner(plan, backend)
    total, count = 0.0, 0
    try:
        for first in range(0, len(tokens) - 1, _LENGTH):
            part = tokens[first : first + _LENGTH]
            logits = runner.logits([SequencePart(part, 0, (list(range(1, num_blocks)),), None)])
            targets = torch.tensor(part[1:])
            total += float(torch.nn.functional.cross_entropy(logits[:-1].float(), targets, reduction="sum"))
            count += len(targets)
            progress(f"{way.name}: {first + len(part):,} of {len(tokens):,} tokens")
    finally:
        runner.close()
    return math.exp(total / count), count


def main() -> None:
    parser = command_line(__doc__, runs=None)
    parser.add_argument("--document", type=Path, default=Path("docs/LEARN.md"), help="(default docs/LEARN.md)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the document, at most (default 8192)")
    arguments = parser.parse_args()
    text = arguments.document.read_text()
    found = {way.name: perplexity(way, text, arguments.tokens) for way in WAYS}
    if arguments.json:
        print(json.dumps({"perplexity": found, "facts": facts("torch", "transformers")}))
        return
    table = Table("way", "perplexity", "ratio", "tokens", box=None)
    exact = found[WAYS[0].name][0]
    for name, (value, count) in found.items():
        table.add_row(name, f"{value:.3f}", f"{value / exact:.4f}", f"{count:,}")
    print_table(table)


if __name__ == "__main__":
    main()
