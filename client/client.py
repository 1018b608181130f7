"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, Unpack

from google.protobuf.message import Message as ProtoMessage

from kvpool.protocol.tokens import input_digest, pack_tokens
from kvpool.v1 import cache_pb2, common_pb2

from .channels import Channels
from .config import ClientConfig
from .deadline import Deadline
from .encoding import Encoding, num_characters
from .errors import InvalidRequest
from .explanation import Explanation
from .manager import Manager, ManagerMethod
from .messages import Message, as_messages
from .model import Model
from .models import Models
from .options import GenerateOptions
from .prompt import Prompt, RoutedPrompt, routed_prompt
from .request import build_request
from .stream import ClusterAccess, GenerateStream
from .template_process import TemplateProcess
from .watch import Watch, WatchUpdate

MAX_GRACE_SECONDS: Final = 3600
_READ_TIMEOUT_SECONDS: Final = 10.0

_Request = TypeVar("_Request", bound=ProtoMessage)
_Response = TypeVar("_Response", bound=ProtoMessage)


class Client:
    """Talks to one cluster. Cheap to make; channels are opened when first used, inside the running event loop.

    Use it as `async with Client() as client`, or call close(). Any number of requests may run at once, all in the event
    loop of the first.
    """

    def __init__(self, manager: str | None = None, *, config: ClientConfig | None = None) -> None:
        """`manager` is host:port; None: the config's, by default KVPOOL_MANAGER or the manager's port on this machine."""
        config = ClientConfig.from_environment() if config is None else config
        self._config = config if manager is None else replace(config, manager=manager)
        self._channels = Channels()
        self._manager = Manager(self._channels, self._config)
        self._templates = TemplateProcess()
        self._encoding = Encoding()
        self._models = Models(self._manager, self._channels, self._config, self._templates)

    def __repr__(self) -> str:
        return f"Client({self._config.manager})"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all channels, cancel the streams that still run and end the process that renders chat templates. May be
        repeated."""
        try:
            await self._channels.close()
        finally:
            await asyncio.to_thread(self._templates.close)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> GenerateStream:
        """Continue a raw prompt: token ids, or a text, to which the tokenizer adds its usual special tokens.

        Iterate over the stream for chunks, or `await stream.collect()` for the whole answer. Without options the most likely token
        is taken each time (temperature 0). Options are checked here (InvalidRequest), the prompt when the stream starts.
        """
        prompt = prompt if isinstance(prompt, str) else tuple(prompt)
        return self._stream(lambda model: self._encode_prompt(model, prompt), options)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template_arguments: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateStream:
        """Let the assistant speak next: `messages` are {"role": …, "content": …}, put into the model's own form by its
        chat template; `template_arguments` are more variables for it. A content may be a list of text parts, as in the OpenAI
        API. Messages and options are checked here (InvalidRequest)."""
        messages = as_messages(messages)
        length = num_characters(messages)
        return self._stream(
            lambda model: self._encoding.run(length, lambda: model.chat_prompt(messages, template_arguments)), options
        )

    async def _encode_prompt(self, model: Model, prompt: str | Sequence[int]) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(model.encode_prompt(prompt))  # which are only checked
        return Prompt(await self._encoding.run(len(prompt), lambda: model.encode_prompt(prompt)))

    async def model(self, name: str | None = None, *, timeout: float | None = None) -> Model:
        """Return facts, tokenizer and chat template of a model, as its workers serve it now. `name` None: the one model that all
        workers serve. Where workers differ, those of the worker that registered last count, and the largest limits. Costs one call
        to the manager; what has not changed is not fetched again."""
        return await self._models.look(name, Deadline(timeout or _READ_TIMEOUT_SECONDS))

    async def describe(
        self,
        *,
        worker_id: str = "",
        first_block: int | None = None,
        max_blocks: int = 0,
        group: int = 0,
        max_sequences: int = 0,
        timeout: float | None = None,
    ) -> cache_pb2.DescribeResponse:
        """List live workers and their block counts. With worker_id and first_block also a page of the block map of a group; with
        max_sequences also at most that many live sequences of each worker, oldest first (1,000 in all)."""
        request = cache_pb2.DescribeRequest(
            worker_id=worker_id,
            include_blocks=first_block is not None,
            first_block=first_block or 0,
            max_blocks=max_blocks,
            group=group,
            max_sequences=max_sequences,
        )
        return await self._manager.describe(Deadline(timeout or _READ_TIMEOUT_SECONDS), request)

    async def describe_block(
        self, worker_id: str, block_id: int, *, group: int = 0, timeout: float | None = None
    ) -> cache_pb2.DescribeBlockResponse:
        """Describe one block of a worker's group: what it holds, the prefix before it and the sequences that share it. NotFound if
        the worker is not there."""
        if not 0 <= block_id < 2**32:
            raise InvalidRequest(f"a block id must be in 0 … 2**32 − 1, got {block_id}", reason="BAD_FIELD")
        request = cache_pb2.DescribeBlockRequest(worker_id=worker_id, block_id=block_id, group=group)
        return await self._call(lambda stub: stub.DescribeBlock, request, timeout)

    def watch(
        self,
        *,
        pictures: bool = True,
        contents: bool = False,
        interval: float = 1.0,
        worker_id: str = "",
        blocks: bool = False,
        max_sequences: int = 0,
    ) -> AsyncGenerator[WatchUpdate, None]:
        """Watch the cluster, for ever. Yields a Picture every `interval` seconds (0.1 to 10): the first one whole, later ones with
        what has changed; a PictureView puts them together. With `contents` it also yields every content that becomes a hit or is
        evicted (Contents). `blocks` adds each block, `max_sequences` the first live sequences of each worker (1,000 in all),
        `worker_id` leaves out all other workers.

        A ManagerAway says that the stream was lost; it is opened again by itself, and contents go on where they broke off. Use it
        in `async with contextlib.aclosing(client.watch(…)) as updates`, which ends the stream with the loop."""
        if not (pictures or contents):
            raise InvalidRequest("watch pictures, contents or both: neither was asked for", reason="BAD_FIELD")
        if not 0.1 <= interval <= 10:
            raise InvalidRequest(f"interval must be in 0.1 … 10 seconds, got {interval:g}", reason="BAD_FIELD")
        if not 0 <= max_sequences < 2**32:
            raise InvalidRequest(f"max_sequences must be in 0 … 2**32 − 1, got {max_sequences}", reason="BAD_FIELD")
        request = cache_pb2.WatchRequest()
        if pictures:
            request.picture.interval_ms = round(interval * 1000)
            request.picture.worker_id = worker_id
            request.picture.include_blocks = blocks
            request.picture.max_sequences = max_sequences
        if contents:
            request.contents.SetInParent()
        return Watch(self._channels, self._config, request).updates()

    async def check(self, *, timeout: float | None = None) -> cache_pb2.CheckResponse:
        """Audit the manager's laws. Without violations in the answer every law holds."""
        return await self._call(lambda stub: stub.Check, cache_pb2.CheckRequest(), timeout)

    async def route(
        self,
        token_ids: Sequence[int],
        *,
        model_fingerprint: str = "",
        adapter: str = "",
        tenant_salt: str = "",
        encoder_token_ids: Sequence[int] = (),
        timeout: float | None = None,
    ) -> cache_pb2.RouteResponse:
        """Rank the workers for a prompt, best first. Advisory; changes nothing. For a model with an encoder the prompt is
        `encoder_token_ids`, and `token_ids` are the first tokens of the decoder's text."""
        root = common_pb2.Root(model_fingerprint=model_fingerprint, adapter=adapter, tenant_salt=tenant_salt)
        if encoder_token_ids:
            root.input_digest = input_digest(encoder_token_ids)
        prompt = RoutedPrompt(root, list(token_ids), len(encoder_token_ids))
        return await self._manager.route(Deadline(timeout or _READ_TIMEOUT_SECONDS), prompt)

    async def explain(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        model: str | None = None,
        adapter: str = "",
        tenant_salt: str = "",
        worker_id: str = "",
        timeout: float | None = None,
    ) -> Explanation:
        """Explain how much of a prompt (text or token ids), or of a chat's `messages`, each worker would serve from its cache now,
        why no more, and which cached prompt comes closest. `worker_id` asks for one worker only. Changes nothing."""
        if (prompt is None) == (messages is None):
            raise InvalidRequest("explain() needs either a prompt or messages", reason="BAD_FIELD")
        deadline = Deadline(timeout or _READ_TIMEOUT_SECONDS)
        chat = None if messages is None else as_messages(messages)
        served = await self._models.look(model, deadline)
        # As in a stream.
        if chat is not None:
            token_ids = await self._encoding.run(
                num_characters(chat), lambda: served.encode_chat(chat, template_arguments)
            )
        else:
            token_ids = (await self._encode_prompt(served, prompt or "")).token_ids
        root = common_pb2.Root(model_fingerprint=served.fingerprint, adapter=adapter, tenant_salt=tenant_salt)
        asked = routed_prompt(root, served.encoder, token_ids)
        request = cache_pb2.ExplainRequest(root=asked.root, tokens=pack_tokens(asked.token_ids), worker_id=worker_id)
        response = await self._manager.call(lambda stub: stub.Explain, request, deadline)
        return Explanation.from_proto(response, asked)

    async def drain(self, worker_id: str, *, grace: float | None = None, timeout: float | None = None) -> int:
        """Ask a worker to take no new requests, end the running ones within `grace` seconds (None: its own setting)
        and leave. Returns its session at once; it has left when `describe` no longer lists its incarnation. May be repeated."""
        if grace is not None and not 0 <= grace <= MAX_GRACE_SECONDS:
            raise InvalidRequest(
                f"the grace of a drain must be 0 to {MAX_GRACE_SECONDS} seconds, got {grace:g}", reason="BAD_FIELD"
            )
        request = cache_pb2.DrainRequest(worker_id=worker_id, grace_ms=None if grace is None else round(grace * 1000))
        return (await self._call(lambda stub: stub.Drain, request, timeout)).session

    async def _call(
        self, method: ManagerMethod[_Request, _Response], request: _Request, timeout: float | None
    ) -> _Response:
        return await self._manager.call(method, request, Deadline(timeout or _READ_TIMEOUT_SECONDS))

    def _stream(self, encode: Callable[[Model], Awaitable[Prompt]], options: GenerateOptions) -> GenerateStream:
        return GenerateStream(
            ClusterAccess(self._config, self._channels, self._manager, self._models),
            encode=encode,
            request=build_request(options),
            model_name=options.get("model"),
            explain=bool(options.get("explain")),
            timeout=options.get("timeout"),
            default_temperature=options.get("default_temperature") or 0.0,
        )
