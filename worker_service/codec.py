"""Conversion between the messages of WorkerService and the engine's types. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from kvpool.protocol.answers import ID_SUFFIX_BYTES
from kvpool.protocol.defaults import fill_in
from kvpool.protocol.limits import MAX_ID_BYTES, BadField, check_options
from kvpool.protocol.sampling import sampling_fields
from kvpool.v1 import worker_pb2

from .engine.beam_search import BeamParams
from .engine.errors import EngineError, ErrorKind, invalid
from .engine.prompt import PromptEncoder
from .engine.request import GenerationParams
from .engine.stream import StreamChunk
from .step import RowLogprobs, SamplingParams

PART_BYTES = 1 << 16
"""Bytes of a model's files in one message, which is in memory until its reader takes it."""
MAX_PROMPT_LOGPROBS = 256
"""Log-probabilities of prompt tokens in one message: 50 KB with 20 most likely tokens each."""

ModelFiles = dict["worker_pb2.ModelFile", bytes]
"""The files that GetModel streams, by kind."""


def check_generate(request: worker_pb2.GenerateRequest, prompts: PromptEncoder, model_fingerprint: str) -> None:
    """Make every check that needs neither a list of the prompt's ids nor the tokens of its text. Raises EngineError naming the
    field that is wrong."""
    _check_id(request)
    if request.attempt < 1:
        raise invalid("attempt", "needed 1 or more: attempts are counted from 1")
    try:
        check_options(request)
    except BadField as error:
        raise invalid(error.field, f"needed {error.needed}, got {error.got}") from None
    if request.adapter:
        raise invalid("adapter", f"this worker has no adapters, {request.adapter!r} was asked for; leave it empty")
    if request.model_fingerprint not in ("", model_fingerprint):
        raise EngineError(
            ErrorKind.OTHER_MODEL,
            f"the request was made for the model {request.model_fingerprint[:16]}…, this worker serves "
            f"{model_fingerprint[:16]}…: ask GetModel and tokenise again",
        )
    if prompts.encoder is not None:
        _check_no_prompt_in_answer(request)
    which = request.WhichOneof("prompt")
    if which is None:
        raise invalid("prompt", "needed text or token_ids, got neither")
    if which == "text":
        prompts.check_text(request.text)
    else:
        prompts.check_num_tokens(len(request.token_ids.ids), request.num_delivered_tokens)


def _check_id(request: worker_pb2.GenerateRequest) -> None:
    has_further = request.n > 1 or request.beam_search.num_beams > 1
    most = MAX_ID_BYTES - (ID_SUFFIX_BYTES if has_further else 0)
    if not 1 <= len(request.sequence_id.encode()) <= most:
        raise invalid("sequence_id", f"needed 1 to {most} bytes, got {len(request.sequence_id.encode())}")


def _check_no_prompt_in_answer(request: worker_pb2.GenerateRequest) -> None:
    """Check that the answer is not asked to have the prompt, which feeds the encoder and so is no part of the text."""
    for field, is_asked in (("echo", request.echo), ("prompt_logprobs", request.HasField("prompt_logprobs"))):
        if is_asked:
            raise invalid(
                field,
                "the prompt of this model feeds its encoder: it is not the beginning of the text, and its tokens have no "
                "probabilities; leave the field out",
            )


def decode_generate(
    request: worker_pb2.GenerateRequest,
    prompts: PromptEncoder,
    defaults: worker_pb2.GenerationDefaults | None = None,
) -> GenerationParams:
    """A checked request as the engine's parameters, with the model's `defaults` where it says nothing: they are set in it.
    Tokenises a text, which may take seconds. Raises EngineError naming the field that is wrong."""
    is_text = request.WhichOneof("prompt") == "text"
    token_ids = prompts.encode(request.text) if is_text else list(request.token_ids.ids)
    num_logprobs = request.logprobs if request.HasField("logprobs") else None
    num_delivered = _num_delivered(request, len(token_ids))
    token_ids, encoder_token_ids = prompts.split(token_ids, num_delivered)
    if defaults is not None:
        fill_in(request, defaults, num_first=len(token_ids) - num_delivered, max_model_len=prompts.max_model_len)
        _check_id(request)
    return GenerationParams(
        sequence_id=request.sequence_id,
        attempt=request.attempt,
        token_ids=token_ids,
        encoder_token_ids=encoder_token_ids,
        num_delivered_tokens=num_delivered,
        sampling=SamplingParams(**sampling_fields(request.sampling), num_logprobs=num_logprobs),
        max_tokens=request.stop.max_tokens,
        stop_token_ids=frozenset(request.stop.stop_token_ids),
        stop_strings=tuple(request.stop.stop_strings),
        ignore_eos=request.stop.ignore_eos,
        min_tokens=request.stop.min_tokens,
        num_prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        echo=request.echo,
        tenant_salt=request.tenant_salt,
        priority=request.priority,
        tenant=request.tenant,
        boundaries=tuple(request.boundaries),
        num_answers=max(1, request.n),
        beams=_beams(request.beam_search),
    )


def _beams(message: worker_pb2.BeamSearch) -> BeamParams | None:
    if message.num_beams < 2:
        return None
    penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    return BeamParams(message.num_beams, penalty, message.early_stopping)


def _num_delivered(request: worker_pb2.GenerateRequest, num_prompt: int) -> int:
    if not request.num_delivered_tokens:
        return 0
    if request.WhichOneof("prompt") != "token_ids":
        raise invalid("num_delivered_tokens", "counts tokens of the prompt: send the prompt as token_ids")
    if request.num_delivered_tokens >= num_prompt:
        raise invalid(
            "num_delivered_tokens",
            f"needed less than the {num_prompt} tokens of the prompt, got {request.num_delivered_tokens}",
        )
    return request.num_delivered_tokens


def encode_chunk(chunk: StreamChunk) -> Iterator[worker_pb2.GenerateResponse]:
    """The next messages of the stream: one, unless log-probabilities of a long prompt need more."""
    prompt = [
        worker_pb2.PromptLogprobs(logprobs=None if logprobs is None else _encode_logprobs(logprobs))
        for logprobs in chunk.prompt_logprobs
    ]
    while len(prompt) > MAX_PROMPT_LOGPROBS:
        yield worker_pb2.GenerateResponse(
            index=chunk.index, usage=chunk.usage, prompt_logprobs=prompt[:MAX_PROMPT_LOGPROBS]
        )
        del prompt[:MAX_PROMPT_LOGPROBS]
    response = worker_pb2.GenerateResponse(
        start_index=chunk.start_index,
        token_ids=[token.token_id for token in chunk.tokens],
        text=chunk.text,
        usage=chunk.usage,
        prompt_logprobs=prompt,
        finish_reason=None if chunk.finish_reason is None else chunk.finish_reason.value,
        index=chunk.index,
        score=chunk.score,
    )
    for token in chunk.tokens:
        if token.logprobs is not None:
            response.logprobs.append(_encode_logprobs(token.logprobs))
    yield response


def _encode_logprobs(logprobs: RowLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def encode_files(files: ModelFiles) -> list[worker_pb2.FileInfo]:
    """Names, sizes and digests of the files that GetModel streams."""
    return [
        worker_pb2.FileInfo(file=file, size_bytes=len(data), digest=hashlib.sha256(data).digest())
        for file, data in files.items()
    ]


_WORKERS_OWN: Final = (
    "worker_id",
    "device",
    "max_model_len",
    "max_num_seqs",
    "block_size",
    "batch_invariance",
    "max_encoder_tokens",
)
"""Fields of ModelFacts that may differ between the workers of one model without a change of the model."""


def facts_digest(facts: worker_pb2.ModelFacts) -> bytes:
    """Names all that GetModel answers of the model: SHA-256 of its facts, files by their digests, without the worker's own."""
    common = worker_pb2.ModelFacts()
    common.CopyFrom(facts)
    for field in _WORKERS_OWN:
        common.ClearField(field)
    return hashlib.sha256(common.SerializeToString(deterministic=True)).digest()


def file_parts(files: ModelFiles) -> Iterator[worker_pb2.GetModelResponse]:
    """The files in parts, file after file, each file's parts in order."""
    for file, data in files.items():
        for offset in range(0, len(data), PART_BYTES):
            part = worker_pb2.FilePart(file=file, offset_bytes=offset, data=data[offset : offset + PART_BYTES])
            yield worker_pb2.GetModelResponse(part=part)
