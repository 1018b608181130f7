"""Limits of a message's size and of the options of a GenerateRequest. Clients check before they send, workers again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpool.v1 import worker_pb2

from .sampling import SAMPLING_OPTIONS, Range, sampling_fields

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest message in either direction: four prompts of a million tokens."""
MAX_ID_BYTES: Final = 128
"""Longest sequence_id."""
MAX_NAME_BYTES: Final = 256
"""Longest adapter, tenant and tenant_salt."""
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_BYTES: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGPROBS: Final = 20
"""Most likely tokens whose log-probabilities are reported with each token."""
MAX_LOGIT_BIASES: Final = 1024
MAX_RULED_IDS: Final = 4096
"""Ids in all fields that forbid or force tokens together."""
MAX_BOUNDARIES: Final = 8
"""Boundaries in one prompt: lengths after which other prompts continue."""
MAX_ANSWERS: Final = 128
"""Answers to one request."""
MAX_BEAMS: Final = 64
MAX_LENGTH_PENALTY: Final = 6.0
"""Largest length_penalty: a million to this power is still a float32."""


class BadField(Exception):
    """A field of a request is outside its limits; `needed` and `got` say which limit."""

    def __init__(self, field: str, needed: str, got: object) -> None:
        super().__init__(f"{field}: needed {needed}, got {got}")
        self.field = field
        """Path of the field in the request, e.g. sampling.top_p."""
        self.needed = needed
        self.got = got


def check_options(request: worker_pb2.GenerateRequest) -> None:
    """Check all fields but the prompt and the names of model, sequence and attempt. Raises BadField for the first bad one."""
    for name in ("adapter", "tenant_salt", "tenant"):
        _require_at_most(name, len(getattr(request, name).encode()), MAX_NAME_BYTES, "bytes")
    for name in ("logprobs", "prompt_logprobs"):
        _require_at_most(name, getattr(request, name), MAX_LOGPROBS, "tokens")
    _require_at_most("boundaries", len(request.boundaries), MAX_BOUNDARIES, "lengths")
    stop = request.stop
    _require_at_most("stop.stop_token_ids", len(stop.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    _require_at_most("stop.stop_strings", len(stop.stop_strings), MAX_STOP_STRINGS, "strings")
    for text in stop.stop_strings:
        if not 1 <= len(text.encode()) <= MAX_STOP_STRING_BYTES:
            raise BadField("stop.stop_strings", f"strings of 1 to {MAX_STOP_STRING_BYTES} bytes", len(text.encode()))
    sampling = request.sampling
    _require_at_most("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES, "ids")
    for name, value in sampling_fields(sampling).items():
        if (allowed := SAMPLING_OPTIONS[name].allowed) is not None:
            _require_within(f"sampling.{name}", value.values() if name == "logit_bias" else [value], allowed)
    check_ruled_ids(sampling)
    _check_answers(request)


def check_ruled_ids(sampling: worker_pb2.SamplingParams) -> None:
    """Check the fields that forbid or force token ids. Raises BadField."""
    num_ids = 0
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"):
        num_ids += len(getattr(sampling, name).ids)
        _require_at_most(f"sampling.{name}", num_ids, MAX_RULED_IDS, "ids")
    for words in sampling.bad_words_ids.lists:
        num_ids += len(words.ids)
        if not words.ids:
            raise BadField("sampling.bad_words_ids", "lists of one id or more", "an empty one")
        _require_at_most("sampling.bad_words_ids", num_ids, MAX_RULED_IDS, "ids")


def _check_answers(request: worker_pb2.GenerateRequest) -> None:
    """Check the number of answers, and the options of a beam search."""
    _require_at_most("n", request.n, MAX_ANSWERS, "answers")
    search = request.beam_search
    _require_at_most("beam_search.num_beams", search.num_beams, MAX_BEAMS, "beams")
    _require_within(
        "beam_search.length_penalty", [search.length_penalty], Range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    )
    if search.early_stopping not in worker_pb2.EarlyStopping.values():
        raise BadField("beam_search.early_stopping", "a value of EarlyStopping", search.early_stopping)
    if search.num_beams > 1:
        if request.n > search.num_beams:
            raise BadField("n", f"at most num_beams ({search.num_beams}): each answer is a beam", request.n)
        if request.sampling.temperature:
            raise BadField(
                "sampling.temperature", "0 with num_beams: beams are not drawn", request.sampling.temperature
            )
    elif search.HasField("length_penalty") or search.early_stopping:
        raise BadField("beam_search.num_beams", "2 or more with length_penalty or early_stopping", search.num_beams)
    if request.num_delivered_tokens and (request.n > 1 or search.num_beams > 1):
        raise BadField("num_delivered_tokens", "0 with several answers or beams", request.num_delivered_tokens)


def _require_at_most(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise BadField(field, f"at most {most} {what}", count)


def _require_within(field: str, numbers: Iterable[float], allowed: Range) -> None:
    for number in numbers:
        if not allowed.holds(number):
            raise BadField(field, f"a number in {allowed}", f"{number:g}")
