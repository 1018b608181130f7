"""Converts the options of generate() and chat() to request messages."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvpool.protocol.answers import answer_seed
from kvpool.protocol.defaults import fill_in
from kvpool.protocol.limits import MAX_MESSAGE_BYTES, BadField, check_options
from kvpool.protocol.sampling import SAMPLING_OPTIONS
from kvpool.v1 import worker_pb2

from .errors import InvalidRequest
from .model import Model
from .options import GenerateOptions
from .prompt import Prompt

_CLIENTS_OWN: Final = ("timeout", "model", "explain", "default_temperature")
"""Options that are not fields of the request."""
_OPTION_OF: Final = {"stop_strings": "stop"}
"""Option of each field that has another name than its option."""
_FIELD_OF: Final = {option: field for field, option in _OPTION_OF.items()}

_EARLY_STOPPING: Final[Mapping[object, object]] = {
    False: worker_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: worker_pb2.EARLY_STOPPING_FULL,
    "never": worker_pb2.EARLY_STOPPING_NEVER,
}

_TYPES: Final[Mapping[int, str]] = {
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_INT32: "an integer in -2**31 … 2**31 − 1",
    FieldDescriptor.CPPTYPE_UINT32: "an integer in 0 … 2**32 − 1",
    FieldDescriptor.CPPTYPE_UINT64: "an integer in 0 … 2**64 − 1",
    FieldDescriptor.CPPTYPE_STRING: "text",
    FieldDescriptor.CPPTYPE_ENUM: 'True, False or "never"',
    FieldDescriptor.CPPTYPE_MESSAGE: "token ids, each with a number",
}
_MESSAGES: Final[Mapping[Any, str]] = {
    worker_pb2.TokenIds.DESCRIPTOR: "a list of token ids",
    worker_pb2.TokenIdLists.DESCRIPTOR: "a list of lists of token ids",
}


def build_request(options: GenerateOptions) -> worker_pb2.GenerateRequest:
    """Convert the options to a request without a prompt; options that are None are left out. InvalidRequest names the first option
    that is wrong and what it may be."""
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        names = ", ".join(GenerateOptions.__annotations__)
        raise InvalidRequest(f"unknown option {unknown[0]!r}; there are {names}", reason="BAD_FIELD")
    request = worker_pb2.GenerateRequest()
    for option, value in options.items():
        if value is not None and option not in _CLIENTS_OWN:
            _set(request, option, _EARLY_STOPPING.get(value, value) if option == "early_stopping" else value)
    _require(options.get("n") != 0, "n", "at least 1", 0)
    _require(options.get("num_beams") != 0, "num_beams", "at least 1", 0)
    stop, timeout = request.stop, options.get("timeout")
    _require(options.get("max_tokens") != 0, "max_tokens", "at least 1, or None", 0)
    _require(stop.min_tokens <= (stop.max_tokens or 2**32), "min_tokens", "at most max_tokens", stop.min_tokens)
    is_time = isinstance(timeout, Real) and 0 < timeout <= 86_400
    _require(timeout is None or is_time, "timeout", "in (0, 86400] seconds, or None", timeout)
    try:
        check_options(request)
    except BadField as error:
        field = error.field.rpartition(".")[2]
        _require(False, _OPTION_OF.get(field, field), error.needed, error.got)
    usual = options.get("default_temperature") or 0
    allowed = SAMPLING_OPTIONS["temperature"].allowed
    is_allowed = allowed is None or (isinstance(usual, Real) and allowed.holds(float(usual)))
    _require(is_allowed, "default_temperature", f"a number in {allowed}", usual)
    _choose_seed(request)
    return request


def request_for(
    asked: worker_pb2.GenerateRequest, model: Model, prompt: Prompt, default_temperature: float = 0.0
) -> worker_pb2.GenerateRequest:
    """Return the request to a model for that prompt. Fields that the caller leaves open get the model's defaults here, so that
    every attempt asks for the same."""
    request = worker_pb2.GenerateRequest()
    request.CopyFrom(asked)
    num_first = model.num_first_tokens(len(prompt.token_ids))
    fill_in(request, model.defaults, num_first=num_first, max_model_len=model.max_model_len)
    if not request.sampling.HasField("temperature"):
        request.sampling.temperature = default_temperature
    _choose_seed(request)
    if not request.stop.ignore_eos:
        own_ids = set(request.stop.stop_token_ids)
        request.stop.stop_token_ids.extend(token_id for token_id in prompt.stop_token_ids if token_id not in own_ids)
    return request


def require_fits(message: Message) -> None:
    """Raise InvalidRequest if the message is larger than one may be."""
    if message.ByteSize() > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request has {message.ByteSize()} bytes, a message holds {MAX_MESSAGE_BYTES}: shorten the prompt",
            reason="NEVER_FITS",
        )


def _choose_seed(request: worker_pb2.GenerateRequest) -> None:
    """Choose a seed if the request needs one, so that every attempt draws alike."""
    if request.sampling.temperature and not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)


def attempt_request(
    request: worker_pb2.GenerateRequest,
    *,
    token_ids: Sequence[int],
    boundaries: Sequence[int] = (),
    num_delivered: int,
    sequence_id: str,
    attempt: int,
    model_fingerprint: str,
) -> worker_pb2.GenerateRequest:
    """Return the message of one attempt. `token_ids`: the prompt, then the `num_delivered` tokens of earlier attempts, fewer than
    max_tokens. `boundaries`: those of the prompt, if the request has none of its own."""
    message = worker_pb2.GenerateRequest(
        sequence_id=sequence_id,
        attempt=attempt,
        token_ids=worker_pb2.TokenIds(ids=token_ids),
        model_fingerprint=model_fingerprint,
        num_delivered_tokens=num_delivered,
    )
    message.MergeFrom(request)
    if not request.boundaries:
        message.boundaries.extend(boundaries)
    if request.stop.max_tokens:
        assert num_delivered < request.stop.max_tokens, (num_delivered, request.stop.max_tokens)
        message.stop.max_tokens -= num_delivered
    return message


def answer_request(request: worker_pb2.GenerateRequest, index: int) -> worker_pb2.GenerateRequest:
    """Return a request for one of the n answers alone."""
    message = worker_pb2.GenerateRequest()
    message.CopyFrom(request)
    message.ClearField("n")
    message.sampling.seed = answer_seed(request.sampling.seed, index)
    return message


def _set(request: worker_pb2.GenerateRequest, option: str, value: object) -> None:
    """Set the field of that option, in whichever part of the request it is."""
    name = _FIELD_OF.get(option, option)
    parts: tuple[Message, ...] = (request.sampling, request.stop, request.beam_search, request)
    part = next(part for part in parts if name in part.DESCRIPTOR.fields_by_name)
    field = part.DESCRIPTOR.fields_by_name[name]
    try:
        if field.message_type is worker_pb2.TokenIds.DESCRIPTOR:
            getattr(part, name).CopyFrom(_token_ids(value))
        elif field.message_type is worker_pb2.TokenIdLists.DESCRIPTOR:
            getattr(part, name).CopyFrom(worker_pb2.TokenIdLists(lists=map(_token_ids, _listed(value))))
        elif field.message_type is not None:
            getattr(part, name).update(value)
        elif field.is_repeated:
            getattr(part, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(part, name, value)
    except (TypeError, ValueError):
        kind = _MESSAGES.get(field.message_type, _TYPES[field.cpp_type])
        is_list = field.is_repeated and field.message_type is None
        _require(False, option, f"a list, each {kind}" if is_list else kind, reprlib.repr(value))


def _token_ids(value: object) -> worker_pb2.TokenIds:
    """Convert a list of ids, or a single one, as in transformers. Raises TypeError or ValueError."""
    return worker_pb2.TokenIds(ids=[value] if isinstance(value, int) else _listed(value))


def _listed(value: object) -> Iterable[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError
    return value


def _require(holds: bool, option: str, expected: str, got: object) -> None:
    """Raise InvalidRequest for the option unless `holds`."""
    if not holds:
        raise InvalidRequest(f"{option} must be {expected}; got {got}", reason="BAD_FIELD")
