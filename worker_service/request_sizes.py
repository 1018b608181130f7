"""Size limits of the worker's requests, from the longest sequence and the model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpool.process.request_guard import SMALL, RequestLimit
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.text_bound import TextBound
from kvpool.v1 import worker_pb2

_SERVICE: Final[str] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_ROOM: Final = 64 << 10
"""Bytes for all fields but the prompt. At their limits they take a third of it: biases 15 KB, stop strings 4 KB, names."""


def request_limits(max_model_len: int, vocab_size: int, text_bound: TextBound) -> Mapping[str, RequestLimit]:
    """Limits by full method name. A method without an entry gets the smallest limit."""
    generate = RequestLimit(
        _ROOM + max_prompt_bytes(max_model_len, vocab_size, text_bound),
        f"shorten the prompt; this worker takes {max_model_len} tokens (--max-model-len)",
    )
    by_name = {"GetModel": SMALL, "Generate": generate, "GenerateMany": generate}
    return {f"/{_SERVICE}/{name}": limit for name, limit in by_name.items()}


def max_prompt_bytes(max_model_len: int, vocab_size: int, text_bound: TextBound) -> int:
    """The largest size in bytes of a prompt, text or ids, of `max_model_len` tokens; at most MAX_MESSAGE_BYTES."""
    # Ids that are not packed have a tag each.
    id_bytes = 1 + -(-max(1, vocab_size - 1).bit_length() // 7)
    if text_bound.uncounted:
        return MAX_MESSAGE_BYTES  # dropped bytes may make a text of any length
    return min(MAX_MESSAGE_BYTES, max(max_model_len * id_bytes, text_bound.max_bytes))
