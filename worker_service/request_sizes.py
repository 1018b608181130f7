"""How large a request of each of the worker's methods may be, out of the longest sequence and the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvpool.process.request_guard import SMALL, RequestLimit
from kvpool.process.server_settings import MAX_MESSAGE_BYTES
from kvpool.v1 import worker_pb2
from tokenizers import Tokenizer, models, pre_tokenizers

_SERVICE: Final[str] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_ROOM: Final = 64 << 10
"""For everything but the prompt. The other fields at their limits take a third of it: biases 15 KB, stop strings 4 KB, names."""

_KEEP_EVERYTHING: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that drop no character, whatever their settings."""


def request_limits(max_model_len: int, vocab_size: int, tokenizer: Tokenizer | None) -> Mapping[str, RequestLimit]:
    """By full method name. A new method has an entry here, or the smallest limit."""
    by_name = {
        "GetModel": SMALL,
        "Generate": RequestLimit(
            _ROOM + max_prompt_bytes(max_model_len, vocab_size, tokenizer),
            f"shorten the prompt, of which the model takes {max_model_len} tokens (--max-model-len)",
        ),
    }
    return {f"/{_SERVICE}/{name}": limit for name, limit in by_name.items()}


def max_prompt_bytes(max_model_len: int, vocab_size: int, tokenizer: Tokenizer | None) -> int:
    """Bytes beyond which no prompt, as text or as ids, can have at most `max_model_len` tokens; at most what a message may have."""
    # Ids that are not packed have a tag each.
    num_bytes = 1 + -(-max(1, vocab_size - 1).bit_length() // 7)
    if tokenizer is not None:
        if _may_drop_text(tokenizer):
            return MAX_MESSAGE_BYTES
        # In a byte-level vocabulary a byte is a character of one or two bytes, so this is too many rather than too few.
        num_bytes = max(num_bytes, *(len(token.encode()) for token in tokenizer.get_vocab()))
    return min(MAX_MESSAGE_BYTES, max_model_len * num_bytes)


def _may_drop_text(tokenizer: Tokenizer) -> bool:
    """Whether a text may become fewer tokens than its bytes need: part of it is dropped, shortened, or one token whatever its
    length."""
    if tokenizer.normalizer is not None and not _normalizer_keeps(_state(tokenizer.normalizer)):
        return True
    if tokenizer.pre_tokenizer is not None and not _pre_tokenizer_keeps(_state(tokenizer.pre_tokenizer)):
        return True
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return True  # swallows whitespace next to it
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return True  # words that are not in the vocabulary become one unknown token
    vocabulary = tokenizer.get_vocab(with_added_tokens=False).keys()
    if model.byte_fallback:
        return not vocabulary >= {f"<0x{byte:02X}>" for byte in range(256)}
    return not vocabulary >= set(pre_tokenizers.ByteLevel.alphabet())


def _state(component: Any) -> dict[str, Any]:
    """A part of a tokenizer as tokenizer.json has it."""
    found: dict[str, Any] = json.loads(component.__getstate__())
    return found


def _normalizer_keeps(state: Mapping[str, Any]) -> bool:
    match state["type"]:
        case "Sequence":
            return all(map(_normalizer_keeps, state["normalizers"]))
        case "Prepend" | "ByteLevel":
            return True
        case "Replace":
            pattern = state["pattern"].get("String")
            return pattern is not None and len(pattern.encode()) <= len(state["content"].encode())
    return False


def _pre_tokenizer_keeps(state: Mapping[str, Any]) -> bool:
    match state["type"]:
        case "Sequence":
            return all(map(_pre_tokenizer_keeps, state["pretokenizers"]))
        case "Split" | "Punctuation":
            return bool(state["behavior"] != "Removed")
    return state["type"] in _KEEP_EVERYTHING
