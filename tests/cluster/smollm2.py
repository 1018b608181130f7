"""SmolLM2's answers to fixed prompts, as transformers' generate gives them in float32.

They are stored next to this file, because generate takes a second for each: `python -m tests.cluster.smollm2` computes them again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model
from tests.cluster.truth import Truth
from tests.tiny_models import Oracle

NUM_NEW = 8
SYSTEM = "You are a helpful assistant who answers briefly and never makes anything up. Say so when you do not know.\n"
DIARY = " ".join(
    f"Chapter {day}. The traveller counted {day * 7 % 23} bridges, {day * 5 % 17} towers and {day * 11 % 29} boats "
    "before night fell."
    for day in range(1, 9)
)
TEXTS = (
    "The",
    "What is the capital of France?",
    "東京は日本の首都であり、",
    "Москва является столицей",
    "القاهرة هي عاصمة",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    SYSTEM + "Question: what is water made of?\nAnswer:",
    SYSTEM + "Question: who wrote Hamlet?\nAnswer:",
    SYSTEM + "Question: how many legs has a spider?\nAnswer:",
    DIARY + "\nThe traveller",
    DIARY + "\nQuestion: what did the traveller count?\nAnswer:",
)
"""Short, two hundred tokens, other scripts, code, and two beginnings that several prompts share."""
_STORED = Path(__file__).with_suffix(".json")


def _folder() -> Path:
    return resolve_model("smollm2", default_cache_dir(), print).path


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_folder() / "tokenizer.json"))


def oracle() -> Oracle:
    """transformers' generate with the model in float32."""
    return Oracle(AutoModelForCausalLM.from_pretrained(_folder(), dtype=torch.float32))


def compute(oracle: Oracle, texts: Sequence[str], num_tokens: int = NUM_NEW) -> list[Truth]:
    """What generate answers to these texts."""
    encode = tokenizer().encode
    return [Truth.of(oracle, encode(text).ids, num_tokens) for text in texts]


def stored() -> list[Truth]:
    """What generate answered to TEXTS when it was last asked."""
    encode = tokenizer().encode
    rows = json.loads(_STORED.read_text())
    return [Truth(tuple(encode(text).ids), *row) for text, row in zip(TEXTS, rows, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = compute(oracle(), TEXTS)
    lines = (json.dumps([truth.tokens, [[round(p, 6) for p in best] for best in truth.best]]) for truth in answers)
    _STORED.write_text("[\n" + ",\n".join(lines) + "\n]\n")
