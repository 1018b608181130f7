"""A model that writes words: one token for each, in its tokenizer, its chat template and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from kvpool.v1 import worker_pb2

WORDS = ("<unk>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "the", "cat", "sat", "on", "mat", "dog")
BOS, USER, ASSISTANT, THE, CAT, SAT = 1, 3, 4, 5, 6, 7
CHAT_TEMPLATE = (
    "{{ bos_token }} {% for message in messages %}<|{{ message.role }}|> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def word_tokenizer(words: Sequence[str] = WORDS) -> str:
    """tokenizer.json of a tokenizer with one token per word, which puts <bos> before a raw text by itself. `words`: its
    vocabulary, in the order of the ids; the first five are those of WORDS."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<bos>", "<eos>", "<|user|>", "<|assistant|>"])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    # As a training run may leave them behind: a client that obeyed would cut and pad every prompt.
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    return tokenizer.to_str()


def text_files(template: str = CHAT_TEMPLATE, words: Sequence[str] = WORDS, **special_tokens: str) -> dict[int, bytes]:
    return {
        worker_pb2.MODEL_FILE_TOKENIZER: word_tokenizer(words).encode(),
        worker_pb2.MODEL_FILE_CHAT_TEMPLATE: template.encode(),
        worker_pb2.MODEL_FILE_SPECIAL_TOKENS: json.dumps(special_tokens).encode(),
    }
