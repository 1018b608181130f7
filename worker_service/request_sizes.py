"""How large a request of each of the worker's methods may be, out of the longest sequence and the model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpool.process.request_guard import SMALL, RequestLimit
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.v1 import worker_pb2

from .engine.prompt import TextBound

_SERVICE: Final[str] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_ROOM: Final = 64 << 10
"""For everything but the prompt. The other fields at their limits take a third of it: biases 15 KB, stop strings 4 KB, names."""


def request_limits(max_model_len: int, vocab_size: int, text_bound: TextBound) -> Mapping[str, RequestLimit]:
    """By full method name. A new method has an entry here, or the smallest limit. text_bound: of the prompts that are tokenised."""
    by_name = {
        "GetModel": SMALL,
        "Generate": RequestLimit(
            _ROOM + max_prompt_bytes(max_model_len, vocab_size, text_bound),
            f"shorten the prompt, of which the model takes {max_model_len} tokens (--max-model-len)",
        ),
    }
    return {f"/{_SERVICE}/{name}": limit for name, limit in by_name.items()}


def max_prompt_bytes(max_model_len: int, vocab_size: int, text_bound: TextBound) -> int:
    """Bytes beyond which no prompt, as text or as ids, can have at most `max_model_len` tokens; at most what a message may have."""
    # Ids that are not packed have a tag each.
    id_bytes = 1 + -(-max(1, vocab_size - 1).bit_length() // 7)
    if text_bound.uncounted:
        return MAX_MESSAGE_BYTES  # a text that is dropped in part may be of any length
    return min(MAX_MESSAGE_BYTES, max(max_model_len * id_bytes, text_bound.max_bytes))
