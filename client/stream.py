"""One request, from the prompt to the last token of its answers, over as many workers as it takes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from uuid import uuid4

from kvpool.protocol.answers import answer_id
from kvpool.v1 import cache_pb2, common_pb2, worker_pb2

from .answer import Answer
from .channels import Channels
from .chunk import Chunk
from .completion import Completion
from .config import ClientConfig
from .deadline import Deadline
from .errors import Cancelled, InvalidRequest, KvpoolError, ProtocolError, Unavailable
from .explanation import Explanation
from .failover import Failover, Target, another_may_begin, another_may_go_on
from .forked_streams import MergedStreams
from .manager import Manager
from .model import Model
from .models import Models
from .prompt import Prompt, routed_prompt
from .request import answer_request, attempt_request, request_for, require_fits
from .watched_call import WatchedCall

_NO_WORKER_PAUSE_SECONDS: Final = 0.2
# Longer than a channel waits before it dials a dead address again, so that the next round really dials.
_NEXT_ROUND_PAUSE_SECONDS: Final = 1.3
_LOOK_SECONDS: Final = 2.0
"""Time for the manager to confirm a refusal that is based on the model as it was last seen. Without an answer the refusal holds."""
_MOST_CHANGES: Final = 4
"""Changes of the model while one prompt is routed; after so many the prompt is sent as it was tokenised."""


class ClusterAccess(NamedTuple):
    """What all requests of one client share."""

    config: ClientConfig
    channels: Channels
    manager: Manager
    models: Models


class GenerateStream:
    """The chunks of the answers to one prompt, each answer's in order, however many workers it takes. Nothing is sent before the
    first chunk is asked for.

    When its worker dies, freezes or leaves, the stream continues on another one, after the last token delivered: the next
    chunk has a larger `attempt`, and otherwise the reader sees nothing of it (ClientConfig.continuation). Several answers then
    continue each by itself.

    Use it as `async with client.generate(…) as stream: async for chunk in stream: …`: leaving the block cancels the call,
    and the worker frees the sequence's blocks. Without the block the call ends with the last chunk, or when the object
    is dropped. For one task at a time.
    """

    def __init__(
        self,
        access: ClusterAccess,
        *,
        encode: Callable[[Model], Awaitable[Prompt]],
        request: worker_pb2.GenerateRequest,
        model_name: str | None = None,
        explain: bool = False,
        timeout: float | None = None,
        default_temperature: float = 0.0,
    ) -> None:
        self._access = access
        self._encode = encode
        self._asked = request
        self._default_temperature = default_temperature
        self._request = worker_pb2.GenerateRequest()
        """The request with the model's defaults for what the caller leaves open, once the model is known. The answers refer to this
        object, so it is changed in place."""
        self._request.CopyFrom(request)
        self._model_name = model_name
        self._wants_explanation = explain
        self._explanation: Explanation | None = None
        self._timeout = timeout
        self._sequence_id = str(uuid4())
        self._attempts = Failover(access.config.max_attempts)
        self._answers = [Answer(index, self._request) for index in range(max(1, request.n))]
        """Answers by the index that messages of the call have."""
        self._num_unfinished = len(self._answers)
        """Answers whose last chunk the reader has not taken."""
        self._held_back: list[worker_pb2.GenerateResponse] = []
        """Messages of a beam search, delivered when all are there: so another attempt can begin from the start."""
        self._ready: deque[Chunk] = deque()
        """Chunks that are accepted but not yet taken."""
        self._deadline: Deadline | None = None
        self._model: Model | None = None
        self._token_ids: list[int] = []
        self._boundaries: tuple[int, ...] = ()
        self._longest = 0
        """The model's limit for the tokens of a text, as it was when the prompt was routed."""
        self._most_room: int | None = None
        """Longest text that the largest worker takes, if the text may need more: that worker's refusal then says what is wrong."""
        self._call: WatchedCall | None = None
        self._forks: MergedStreams | None = None
        """Answers that continue each by itself, after their common call has broken off."""
        self._is_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __del__(self) -> None:
        # grpc.aio's calls live in reference cycles: without this a dropped stream would hold its blocks until the
        # collector comes by. It may run in any thread, so the loop's own thread has to cancel.
        if self._call is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    def __repr__(self) -> str:
        return f"GenerateStream({self._sequence_id}, {self._call}, {self._answers}, ended={self._is_ended})"

    @property
    def sequence_id(self) -> str:
        """Name of the sequence at the manager and the workers; with several answers, of the first."""
        return self._sequence_id

    @property
    def num_answers(self) -> int:
        """Number of answers that the request asks for."""
        return len(self._answers)

    def sequence_id_of(self, index: int) -> str:
        """Return the name of the sequence of one answer."""
        return answer_id(self._sequence_id, index)

    @property
    def model(self) -> Model | None:
        """The model that answers; None before the first chunk."""
        return self._model

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model sees it; empty before the first chunk."""
        return tuple(self._token_ids)

    @property
    def explanation(self) -> Explanation | None:
        """What each worker could serve of the prompt when it was routed, and why no more. None before the first chunk, without the
        option `explain`, or if the manager did not explain."""
        return self._explanation

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request: its call is cancelled if it still runs. May be repeated."""
        self._is_ended = True
        self._drop_call()
        forks, self._forks = self._forks, None
        if forks is not None:
            await forks.aclose()

    async def collect(self) -> Completion:
        """Wait for the end and return the whole answer, chunks that were already taken included. With several answers it is the
        first one, which is the best of a beam search."""
        return (await self.collect_all())[0]

    async def collect_all(self) -> list[Completion]:
        """Wait for the end and return all answers, by their index, chunks that were already taken included."""
        while await self.next_chunk() is not None:
            pass
        return [answer.builder.build() for answer in self._answers]

    async def next_chunk(self) -> Chunk | None:
        """Wait for the next chunk; None after the last. An error, or cancelling the task, ends the stream and its call."""
        if self._is_ended:
            return None
        try:
            chunk = await self._next_chunk()
        except BaseException:
            await self.aclose()
            raise
        if chunk is not None and chunk.finish_reason is not None:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                await self.aclose()
        return chunk

    async def _next_chunk(self) -> Chunk | None:
        if self._deadline is None:
            self._deadline = Deadline(self._timeout or self._access.config.timeout)
            self._loop = asyncio.get_running_loop()
        while not self._ready and self._forks is None:
            if self._call is None:
                self._call = await self._open_next(self._deadline)
            target = self._call.target
            try:
                message = await self._call.read(self._num_delivered)
            except KvpoolError as error:
                if not self._may_move(error):
                    raise
                self._move(target, error)
            else:
                self._take(message, target)
        if self._ready or self._forks is None:
            return self._deliver()
        forked = await self._forks.next_chunk()
        return None if forked is None else forked[1]

    @property
    def _num_delivered(self) -> int:
        """Tokens delivered so far, over all answers."""
        return sum(answer.num_delivered for answer in self._answers)

    def _take(self, message: worker_pb2.GenerateResponse, target: Target) -> None:
        """Take in a message of the worker. Its chunk is ready then, or held back in a beam search."""
        is_of_text = bool(message.token_ids) or message.finish_reason != worker_pb2.FINISH_REASON_UNSPECIFIED
        if self._request.beam_search.num_beams > 1 and is_of_text:
            self._held_back.append(message)
            num_finished = sum(text.finish_reason != worker_pb2.FINISH_REASON_UNSPECIFIED for text in self._held_back)
            if num_finished < len(self._answers):
                return
            messages, self._held_back = self._held_back, []
        else:
            messages = [message]
        for piece in messages:
            if piece.index >= len(self._answers):
                raise ProtocolError(
                    f"{target.worker_id} sent a piece of answer {piece.index}; {len(self._answers)} were asked for",
                    reason="OUT_OF_ORDER",
                )
            chunk = self._answers[piece.index].take(piece, target)
            if chunk is not None:
                self._ready.append(chunk)

    def _deliver(self) -> Chunk:
        assert self._deadline is not None
        chunk = self._ready.popleft()
        answer = next(answer for answer in self._answers if answer.index == chunk.index)
        return answer.add(chunk, self._deadline.elapsed() * 1000)

    def _may_move(self, error: KvpoolError) -> bool:
        if self._num_delivered == 0:
            return another_may_begin(error)
        return self._access.config.continuation and another_may_go_on(error)

    def _move(self, target: Target, error: KvpoolError) -> None:
        """Prepare to continue on another worker after the call has broken off. Add the last chunks of complete answers."""
        self._drop_call()
        self._held_back.clear()
        if any(answer.has_grown for answer in self._answers):
            self._attempts.broke_off(target, error)
        else:
            self._attempts.failed(target, error)
        if self._num_delivered == 0:
            return
        assert self._model is not None
        num_prompt = len(self._token_ids)
        num_first = self._model.num_first_tokens(num_prompt)
        unfinished = [answer for answer in self._answers if not answer.is_finished]
        complete = [answer for answer in unfinished if answer.has_all_tokens(num_first, self._longest)]
        self._ready.extend(answer.missing_end(target, num_prompt) for answer in complete)
        if len(self._answers) > 1:
            self._forks = MergedStreams([self._alone(answer) for answer in unfinished if answer not in complete])

    def _alone(self, answer: Answer) -> GenerateStream:
        """Return a stream in which one answer continues by itself. On any worker it gets the tokens that it would have got here."""
        request = answer_request(self._request, answer.index)
        stream = GenerateStream(
            self._access, encode=self._encode, request=request, model_name=self._model_name, timeout=self._timeout
        )
        stream._sequence_id = self.sequence_id_of(answer.index)
        stream._attempts = self._attempts.fork()
        assert stream._num_unfinished == 1
        stream._answers = [answer]
        stream._deadline, stream._loop = self._deadline, self._loop
        stream._model, stream._token_ids, stream._boundaries = self._model, self._token_ids, self._boundaries
        stream._longest = self._longest
        return stream

    async def _open_next(self, deadline: Deadline) -> WatchedCall:
        try:
            return await self._open(deadline)
        except KvpoolError as error:
            if self._num_delivered == 0 or isinstance(error, Cancelled):
                raise
            raise self._attempts.gave_up(error, self._num_delivered) from error

    @property
    def _all_token_ids(self) -> list[int]:
        """Tokens of the prompt, then the delivered ones of the answer if it is the only one; several continue each by itself."""
        if len(self._answers) > 1:
            return self._token_ids
        return [*self._token_ids, *self._answers[0].builder.token_ids]

    async def _open(self, deadline: Deadline) -> WatchedCall:
        """Begin the next attempt. Its first message may still be an error."""
        if self._attempts.wants_ranking:
            if self._attempts.wants_pause:
                await asyncio.sleep(min(_NEXT_ROUND_PAUSE_SECONDS, deadline.remaining()))
            await self._rank(deadline)
        deadline.check("looking for a worker")
        if self._is_ended:
            raise Cancelled("the stream was closed while it looked for a worker", reason="CANCELLED")
        target = self._attempts.next()
        assert self._model is not None
        request = attempt_request(
            self._request,
            token_ids=self._all_token_ids,
            boundaries=self._boundaries,
            num_delivered=self._num_delivered,
            sequence_id=self._sequence_id,
            attempt=target.attempt,
            model_fingerprint=self._model.fingerprint,
        )
        require_fits(request)
        for answer in self._answers:
            answer.begin(target.attempt, deadline.elapsed() * 1000)
        return WatchedCall(
            self._access.channels.generate(target.address, request),
            target,
            manager=self._access.manager,
            liveness_interval=self._access.config.liveness_interval,
            deadline=deadline,
        )

    async def _rank(self, deadline: Deadline) -> None:
        """Find the model, tokenise for it and let the manager rank its workers by all tokens so far. Waits a little for a first
        worker."""
        # Begins when a manager knows no worker: while the manager is away, workers cannot register.
        waited: Deadline | None = None
        num_changes = 0
        self._most_room = None
        while True:
            try:
                model = await self._model_to_ask(deadline)
                root = common_pb2.Root(
                    model_fingerprint=model.fingerprint,
                    adapter=self._request.adapter,
                    tenant_salt=self._request.tenant_salt,
                )
                prompt = routed_prompt(
                    root, model.encoder, self._token_ids, self._all_token_ids[len(self._token_ids) :]
                )
                response = await self._access.manager.route(
                    deadline,
                    prompt,
                    max_workers=self._access.config.max_attempts,
                    num_needed_tokens=self._num_needed_tokens(model),
                    # Once, and before any worker has the prompt: afterwards its own blocks would be hits.
                    explain=self._wants_explanation,
                )
                if num_changes < _MOST_CHANGES and await self._has_changed(model, response, deadline):
                    num_changes += 1
                    continue
                if response.workers:
                    if self._wants_explanation and response.HasField("why"):
                        self._explanation = Explanation.from_proto(response.why, prompt)
                    self._wants_explanation = False
                    self._attempts.rank(response.workers)
                    return
                # Its workers are gone, or back with other weights: find out what is served now.
                self._access.models.forget(model)
                raise Unavailable(
                    f"no live worker serves {model.name}: {response.explanation or 'the manager names none'}",
                    reason="NO_WORKER",
                )
            except Unavailable as error:
                waited = waited or Deadline(self._access.config.worker_wait, deadline.clock)
                if error.reason == "NO_MANAGER" or waited.remaining() == 0:
                    raise
                deadline.check(f"waiting for a worker: {error}")
                await asyncio.sleep(min(_NO_WORKER_PAUSE_SECONDS, waited.remaining(), deadline.remaining()))

    async def _model_to_ask(self, deadline: Deadline) -> Model:
        """Return the model that is served now, and tokenise the prompt for it. After the first token it is the one that began."""
        if self._model is not None and self._num_delivered > 0:
            return self._model
        model = await self._access.models.get(self._model_name, deadline)
        if model is not self._model:
            try:
                prompt = await self._encode_within(model, deadline)
            except InvalidRequest:
                # By what was known of the model, which may have changed.
                now = await self._look_at(model, deadline)
                if now is model:
                    raise
                model, prompt = now, await self._encode_within(now, deadline)
            self._token_ids, self._boundaries = prompt.token_ids, prompt.boundaries
            self._request.CopyFrom(request_for(self._asked, model, prompt, self._default_temperature))
            self._model, self._longest = model, model.max_model_len
        return model

    async def _look_at(self, model: Model, deadline: Deadline) -> Model:
        """Return the model as it is served now; `model` if the manager does not answer."""
        try:
            return await self._access.models.look(
                self._model_name, Deadline(min(_LOOK_SECONDS, deadline.remaining()), deadline.clock)
            )
        except KvpoolError:
            return model

    def _num_needed_tokens(self, model: Model) -> int:
        """Return how many tokens the text may have at its end. Without max_tokens that is as many as the model allows on any
        worker."""
        max_tokens = self._request.stop.max_tokens
        if not max_tokens:
            return self._longest
        needed = min(model.num_first_tokens(len(self._token_ids)) + max_tokens, 2**32 - 1)
        return needed if self._most_room is None else min(needed, self._most_room)

    async def _has_changed(self, model: Model, response: cache_pb2.RouteResponse, deadline: Deadline) -> bool:
        """Whether Route must be asked again because its answer shows that the model has changed."""
        if not response.HasField("model"):
            return False
        longest = response.model.max_model_len
        if self._num_delivered == 0:
            if await self._access.models.settle(self._model_name, model, response.model, deadline) is not model:
                return True
            if response.workers or not 0 < longest < self._num_needed_tokens(model):
                return False
            self._most_room = longest
            return True
        # The largest worker is gone: the text goes on as far as the next one can take it.
        if response.workers or self._request.stop.max_tokens or not len(self._all_token_ids) < longest < self._longest:
            return False
        self._longest = longest
        return True

    async def _encode_within(self, model: Model, deadline: Deadline) -> Prompt:
        """Render and tokenise the prompt within the deadline."""
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await self._encode(model)
        except TimeoutError:
            deadline.check("rendering and tokenising the prompt")
            raise

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
