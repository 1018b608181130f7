"""The engine: accepts requests, runs step after step, and passes tokens on.

All state belongs to the event loop; only the model's forward pass runs in a thread of its own, one step at a time. The loop never
waits for the manager while a step can run: the edge calls the manager during the step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
from tokenizers import Tokenizer

from kvpool.v1 import common_pb2

from ..cache import events
from ..cache.engine_cache import Computed, EngineCache
from ..cache.sequence import CacheSequence, SequenceId
from .admission import Admission
from .errors import EngineError, ErrorKind, invalid
from .policy import SchedulingPolicy
from .prompt import PromptEncoder
from .request import GenerationParams, Payer, Request
from .sampling_checks import check_sampling
from .scheduler import Scheduled, Scheduler, as_step
from .stats import CANCELLED, EngineStats
from .step import BadLogits, PartResult, SampledToken, StepRunner

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the engine, and facts of the model."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    """Prompt and generated tokens of one sequence."""
    eos_token_ids: frozenset[int] = frozenset()
    max_num_seqs: int = 64
    """Sequences in one batch."""
    max_num_batched_tokens: int = 2048
    """Tokens in one step."""
    max_mixed_prefill_tokens: int = 512
    """Prompt tokens in one step while a sequence decodes."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.fcfs
    max_num_waiting: int = 1024
    """Waiting requests; more are refused."""
    max_num_waiting_tokens: int = 1 << 22
    """Prompt tokens of all waiting requests; more are refused, but one prompt may always wait."""
    prefix_caching: bool = True


class Engine:
    """Continuous batching over one model and one cache side. `model_thread`: runs the steps; `run` shuts it down when it ends."""

    def __init__(
        self,
        settings: EngineSettings,
        cache: EngineCache,
        runner: StepRunner,
        tokenizer: Tokenizer | None = None,
        model_thread: ThreadPoolExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.tokenizer = tokenizer
        self.prompts = PromptEncoder(tokenizer, settings.max_model_len)
        self.scheduler = Scheduler(
            cache,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens,
            max_chunk_tokens=cache.settings.max_chunk_tokens if any(cache.settings.windows) else None,
            policy=settings.scheduling_policy,
        )
        self._admission = Admission(
            max_num_waiting=settings.max_num_waiting, max_num_waiting_tokens=settings.max_num_waiting_tokens
        )
        self.stats = EngineStats()
        self.changed_for_link = asyncio.Event()
        """Set when a call to the manager may be due."""
        self.drain_asked = asyncio.Event()
        """Set when the manager asks this worker to leave."""
        self.drain_grace_seconds: float | None = None
        """Time that the manager gives the running requests; None: the worker's own setting."""
        self.is_draining = False
        """New requests are refused."""
        self._emptied = asyncio.Event()
        self._runner = runner
        self._clock = clock
        self._wake = asyncio.Event()
        self._undelivered: list[tuple[Request, SampledToken, float]] = []
        """Tokens of the last step, and when it ended."""
        self._model_thread = model_thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    # -- requests

    def submit(self, params: GenerationParams) -> Request:
        """Accept a request; its tokens arrive on `request.stream`. Raises EngineError, having changed nothing."""
        ending_ids = params.stop_token_ids
        if not params.ignore_eos:
            ending_ids |= self.settings.eos_token_ids
        max_tokens = self._check(params)
        check_sampling(
            params,
            vocab_size=self.settings.vocab_size,
            ending_ids=ending_ids,
            has_tokenizer=self.tokenizer is not None,
        )
        payer = Payer(self.scheduler.policy.level(params), params.tenant)
        displaced = self._admission.check(self.scheduler.waiting, payer, len(params.token_ids), self._clock())
        # KV hits have no logits.
        may_hit = self.settings.prefix_caching and not params.wants_prompt_logprobs
        sequence = CacheSequence(
            params.sequence_id,
            params.attempt,
            common_pb2.Root(
                model_fingerprint=self.settings.model_fingerprint,
                adapter=params.adapter,
                tenant_salt=params.tenant_salt,
            ),
            params.token_ids,
            max_new_tokens=max_tokens,
            max_cached_tokens=None if may_hit else 0,
            no_wait=not may_hit,
            kept=params.boundaries,
        )
        decoder = None
        if self.tokenizer is not None:
            decoder = params.text_decoder(self.tokenizer)
            if decoder.is_stopped:
                raise invalid(
                    "num_delivered_tokens",
                    "the delivered tokens contain a stop string already: the text has ended",
                )
        request = Request(params, sequence, max_tokens, ending_ids, decoder)
        request.times.arrived_at = self._clock()
        for other in displaced:
            self._fail(other, self._admission.displaced(self.scheduler.waiting, self._clock()))
        self.scheduler.add(request)
        self.changed_for_link.set()
        return request

    def _check(self, params: GenerationParams) -> int:
        """Refuse what cannot be served; returns how many tokens may be generated."""
        settings = self.settings
        if self.is_draining:
            raise EngineError(ErrorKind.DRAINING, "this worker is draining and takes no new requests; use another one")
        if not self.cache.is_ready():
            raise EngineError(ErrorKind.UNAVAILABLE, "this worker has no session with the manager right now; try again")
        num_prompt = len(params.token_ids)
        if not num_prompt:
            raise invalid("prompt", "needed at least one token, got none")
        self.prompts.check_num_tokens(num_prompt)
        largest = max(params.token_ids)
        if largest >= settings.vocab_size or min(params.token_ids) < 0:
            raise invalid("prompt", f"token id {largest} is outside the vocabulary of {settings.vocab_size} tokens")
        room = settings.max_model_len - num_prompt
        if params.max_tokens > room:
            raise invalid(
                "max_tokens",
                f"{num_prompt} prompt tokens and {params.max_tokens} new ones exceed this worker's limit of "
                f"{settings.max_model_len}; at most {room} can be generated",
            )
        if self.scheduler.find(SequenceId(params.sequence_id, params.attempt)) is not None:
            raise EngineError(
                ErrorKind.EXISTS,
                f"attempt {params.attempt} of sequence {params.sequence_id!r} already has a stream on this worker",
            )
        max_tokens = params.max_tokens or self._tokens_that_fit(room, num_prompt)
        self._check_fits(num_prompt, max_tokens)
        return max_tokens

    def _tokens_that_fit(self, room: int, num_prompt: int) -> int:
        """The largest number of new tokens, by the model's limit and the pools'."""
        cache = self.cache.settings
        return max(1, min(room, cache.capacity * cache.block_size - num_prompt + 1))

    def _check_fits(self, num_prompt: int, max_tokens: int) -> None:
        cache = self.cache.settings
        num_blocks = -(-(num_prompt + max_tokens - 1) // cache.block_size)
        if num_blocks > cache.capacity:
            raise EngineError(
                ErrorKind.NEVER_FITS,
                f"{num_prompt} prompt tokens and {max_tokens} new ones need {num_blocks} blocks of {cache.block_size}; this worker "
                f"has {cache.capacity}: lower max_tokens, or give the worker more blocks (--num-blocks, --kv-cache-memory)",
                field="max_tokens",
            )

    def abort(self, request: Request) -> None:
        """The reader has gone: end the request and free its blocks. No effect if it has ended."""
        self._break_off(request, CANCELLED)
        self.changed_for_link.set()

    def give_up_reader(self, request: Request, seconds: float) -> None:
        """The reader has taken nothing for `seconds`: end the request, free its blocks and drop unread chunks. The stream fails
        even after its last token, since it is incomplete without them. No effect if it has failed before."""
        num_tokens = request.num_generated
        request.stream.give_up(
            EngineError(
                ErrorKind.SLOW_READER,
                f"the reader took nothing for {seconds:g} s while chunks waited; {num_tokens} tokens were generated: read faster, "
                "ask for less at a time, or give the worker a longer --reader-seconds",
            )
        )
        self._break_off(request, ErrorKind.SLOW_READER.name.lower())
        self.changed_for_link.set()

    def load(self) -> common_pb2.WorkerLoad:
        """Requests and tokens that run and wait."""
        scheduler = self.scheduler
        return common_pb2.WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_uncomputed_tokens=scheduler.num_uncomputed_tokens,
        )

    # -- leaving

    def begin_drain(self) -> None:
        """Refuse new requests, and end those that have not begun: another worker serves them sooner."""
        self.is_draining = True
        for request in self.scheduler:
            if not request.has_begun:
                self._fail(
                    request, EngineError(ErrorKind.DRAINING, "this worker is draining; the request has not begun")
                )
        self._note_if_empty()
        self.changed_for_link.set()

    async def wait_until_empty(self) -> None:
        """Wait, after `begin_drain`, until no request is left."""
        await self._emptied.wait()

    def fail_all(self, error: EngineError) -> None:
        for request in self.scheduler:
            self._fail(request, error)
        self.changed_for_link.set()

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._wake.set()  # a fork that ends may leave its blocks in the reserve
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if self.is_draining and not (self.scheduler.num_running or self.scheduler.num_waiting):
            self._emptied.set()

    # -- running

    def on_cache_changed(self) -> None:
        """The edge has given the cache side a reply or a sequence."""
        self._wake.set()

    async def run(self) -> None:
        """Run steps until cancelled. Cancelling waits for the running step."""
        try:
            while True:
                self._wake.clear()
                self._take_events()
                batch = self.scheduler.schedule(self._clock())
                self.changed_for_link.set()
                if batch:
                    await self._run_step(batch)
                else:
                    self._deliver()
                    await self._wake.wait()
        finally:
            self._model_thread.shutdown(wait=True)

    async def _run_step(self, batch: list[Scheduled]) -> None:
        sequences = [scheduled.sequence for scheduled in batch]
        self.cache.begin_step(sequences)
        step = as_step(batch)
        loop = asyncio.get_running_loop()
        launched_at = self._clock()
        try:
            running = loop.run_in_executor(self._model_thread, self._runner.execute, step)
            self._deliver()
            results = await running
        except Exception as error:
            log.exception("step failed", num_sequences=len(batch))
            self.cache.fail_step(sequences)
            for scheduled in batch:
                self._fail(
                    scheduled.request, EngineError(ErrorKind.INTERNAL, f"the model step failed: {type(error).__name__}")
                )
            return
        now = self._clock()
        self._count_step(batch, now - launched_at, now)
        self._finish_step(batch, results, now)

    def _count_step(self, batch: list[Scheduled], seconds: float, now: float) -> None:
        num_tokens = sum(part.num_tokens for part in batch)
        num_decodes = sum(part.num_tokens == 1 and part.request.num_generated > 0 for part in batch)
        self.stats.on_step(len(batch), num_tokens, num_decodes, seconds)
        self._admission.on_step(num_tokens, seconds, now)

    def _finish_step(self, batch: list[Scheduled], results: list[PartResult], now: float) -> None:
        computed = [_computed(scheduled, result) for scheduled, result in zip(batch, results, strict=True)]
        self.cache.end_step(computed, now)
        for scheduled, result in zip(batch, results, strict=True):
            request = scheduled.request
            # A request may have been aborted while its step ran.
            if self.scheduler.find(scheduled.sequence.id) is request:
                self._take(request, result, now)

    def _take(self, request: Request, result: PartResult, now: float) -> None:
        """Give the request its result of the step. Its reader gets the token after the next step is launched."""
        if result.bad_logits is not None:
            log.warning(
                "no token can be sampled", sequence_id=request.params.sequence_id, **result.bad_logits._asdict()
            )
            self._fail(request, _error_of(result.bad_logits))
            return
        request.on_prompt_logprobs(result.prompt_logprobs)
        request.times.on_computed(request.sequence.num_computed_tokens, now)
        if result.token is not None:
            self.stats.on_token(request, now)
            if request.take(result.token):
                self._remove(request)
            self._undelivered.append((request, result.token, now))

    def _deliver(self) -> None:
        """Pass on the tokens of the last step, now that the next one runs: decoding text takes longer than all else between two
        steps. A request that a stop string ends is in that next step already; its result there is dropped."""
        undelivered, self._undelivered = self._undelivered, []
        for request, token, now in undelivered:
            if not request.stream.is_finished:  # else it has failed since
                self._pass_on(request, token, now)

    def _pass_on(self, request: Request, token: SampledToken, now: float) -> None:
        """Pass on one token. An error in one text ends that request, not the engine."""
        is_running = self.scheduler.find(request.sequence.id) is request
        try:
            if not request.deliver(token):
                return
        except Exception as error:
            log.exception("token could not be decoded", sequence_id=request.params.sequence_id)
            if not is_running:
                self.stats.ended[ErrorKind.INTERNAL.name.lower()] += 1
            self._fail(
                request, EngineError(ErrorKind.INTERNAL, f"the text could not be decoded: {type(error).__name__}")
            )
        else:
            assert request.finish_reason is not None
            self.stats.on_finished(request, request.finish_reason.value, now)
            self._admission.on_finished(request)
            if is_running:
                self._remove(request)
        self.changed_for_link.set()

    def _take_events(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, events.Granted):
                self._on_granted(event.sequence)
            elif isinstance(event, events.Refused):
                self._fail_sequence(
                    event.sequence, EngineError(ErrorKind.REFUSED, event.status.message, status=event.status)
                )
            elif isinstance(event, events.Stopped):
                self._fail_sequence(
                    event.sequence,
                    EngineError(ErrorKind.SUPERSEDED, "a larger attempt of this sequence runs on another worker"),
                )
            elif isinstance(event, events.DrainAsked):
                self.drain_grace_seconds = event.grace_seconds
                self.drain_asked.set()
            elif isinstance(event, events.SessionLost):
                # No request is lost: the running ones continue, and the next session reports them.
                log.info("session ended", why=event.why, num_running=self.scheduler.num_running)
            else:
                self._forget_everything(event)

    def _on_granted(self, sequence: CacheSequence) -> None:
        if request := self.scheduler.on_granted(sequence):
            self.stats.on_granted(request, self._clock())

    def _forget_everything(self, event: events.GivenUp) -> None:
        """End all streams and forget all blocks, between two steps; the edge then registers again."""
        num_requests = self.scheduler.num_running + self.scheduler.num_waiting
        write_log = log.error if event.is_defect else log.warning
        write_log("all blocks are given up", why=event.why, num_requests=num_requests)
        self.fail_all(EngineError(ErrorKind.UNAVAILABLE, f"this worker had to give up its blocks: {event.why}"))
        self.cache.reset()
        self.changed_for_link.set()

    def _fail_sequence(self, sequence: CacheSequence, error: EngineError) -> None:
        request = self.scheduler.find(sequence.id)
        # The id may belong to another request by now, or this one may have been preempted since.
        if request is not None and request.sequence is sequence:
            self._fail(request, error)

    def _fail(self, request: Request, error: EngineError) -> None:
        request.stream.fail(error)
        self._break_off(request, error.kind.name.lower())

    def _break_off(self, request: Request, outcome: str) -> None:
        if self.scheduler.find(request.sequence.id) is request:
            self.stats.ended[outcome] += 1
            self._remove(request)


def _computed(scheduled: Scheduled, result: PartResult) -> Computed:
    sequence = scheduled.sequence
    if result.bad_logits is not None:
        # KV that led to such logits must not be served to other requests.
        return Computed(sequence, sequence.num_computed_tokens, None)
    token_id = None if result.token is None else result.token.token_id
    return Computed(sequence, sequence.num_computed_tokens + scheduled.num_tokens, token_id)


def _error_of(bad: BadLogits) -> EngineError:
    """Why a request cannot continue. Neither kind is retried on another worker, where the result would be the same."""
    what = f"no token can be chosen for position {bad.position}: the largest logit is {bad.largest:g}"
    if not bad.is_adjusted:
        return EngineError(
            ErrorKind.INTERNAL,
            f"{what} where a finite number was needed. The model does this for these tokens on every worker: change the prompt, "
            "or check for weights that are not finite or overflow in the worker's dtype (--dtype)",
        )
    if bad.largest < 0:
        return invalid(
            "stop.min_tokens",
            f"{what}; ids that end the text are excluded before min_tokens, and the model excludes all others: "
            "lower min_tokens, or give fewer stop_token_ids",
        )
    return invalid(
        "sampling.repetition_penalty",
        f"{what}, the model's own is finite: bias and penalties overflow float32; use a penalty nearer to 1",
    )
