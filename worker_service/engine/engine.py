"""The engine: accepts requests, runs step after step, and passes tokens on.

All state belongs to the event loop; only the model's forward pass runs in a thread of its own, one step at a time. The loop never
waits for the manager while a step can run: the edge calls the manager during the step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
from tokenizers import Tokenizer

from kvpool.protocol.tokens import input_digest
from kvpool.v1 import common_pb2

from ..cache import events
from ..cache.engine_cache import EngineCache
from ..cache.sequence import CacheSequence
from ..step import PartResult, SampledToken, StepRunner
from . import results as results_of
from .admission import Admission
from .beams import BeamRequest
from .capacity import Capacity, check_sampling
from .detokenizer import TextDecoder
from .errors import EngineError, ErrorKind, invalid
from .prompt import PromptEncoder
from .request import GenerationParams, Payer, Request
from .scheduler import Scheduled, Scheduler, as_step
from .settings import EngineSettings
from .stats import CANCELLED, EngineStats
from .stream import EndReason

log = structlog.get_logger()


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
        self.prompts = PromptEncoder(tokenizer, settings.max_model_len, settings.encoder)
        self.scheduler = Scheduler(cache, settings)
        self._admission = Admission(settings)
        self._capacity = Capacity(settings, cache.settings)
        self.stats = EngineStats()
        self.changed_for_link = asyncio.Event()
        """Set when a call to the manager may be due."""
        self.drain_asked = asyncio.Event()
        """Set when the manager asks this worker to leave."""
        self.drain_grace_seconds: float | None = None
        """Time that the manager gives the running requests; None: the worker's own setting."""
        self.is_draining = False
        """Whether new requests are refused."""
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
        displaced = self._admission.check(self.scheduler.waiting, payer, params.num_prompt_tokens, self._clock())
        # KV hits have no logits.
        may_hit = self.settings.prefix_caching and not params.wants_prompt_logprobs
        sequence = CacheSequence(
            params.sequence_id,
            params.attempt,
            common_pb2.Root(
                model_fingerprint=self.settings.model_fingerprint,
                tenant_salt=params.tenant_salt,
                input_digest=input_digest(params.encoder_token_ids) if params.encoder_token_ids else b"",
            ),
            params.token_ids,
            max_new_tokens=max_tokens,
            max_cached_tokens=None if may_hit else 0,
            no_wait=not may_hit,
            kept=params.boundaries,
            num_encoder_tokens=len(params.encoder_token_ids),
        )
        request: Request
        if params.beams is not None:
            request = BeamRequest(params, sequence, max_tokens, ending_ids, self.tokenizer)
        else:
            request = Request(params, sequence, max_tokens, ending_ids, self._text_decoder(params))
        request.times.arrived_at = self._clock()
        for other in displaced:
            self._fail(other, self._admission.displaced(self.scheduler.waiting, self._clock()))
        self.scheduler.add(request)
        self.changed_for_link.set()
        return request

    def _text_decoder(self, params: GenerationParams) -> TextDecoder | None:
        if self.tokenizer is None:
            return None
        decoder = params.text_decoder(self.tokenizer)
        if decoder.is_stopped:
            raise invalid(
                "num_delivered_tokens", "the delivered tokens contain a stop string already: the text has ended"
            )
        return decoder

    def _check(self, params: GenerationParams) -> int:
        """Refuse what cannot be served; returns how many tokens may be generated."""
        if self.is_draining:
            raise EngineError(ErrorKind.DRAINING, "this worker is draining and takes no new requests; use another one")
        if not self.cache.is_ready():
            raise EngineError(ErrorKind.UNAVAILABLE, "this worker has no session with the manager right now; try again")
        self.prompts.check_input(params.encoder_token_ids)
        self.prompts.check_text_begins(len(params.token_ids))
        max_tokens = self._capacity.max_tokens(params)
        if self.scheduler.streams.would_clash(params):
            raise EngineError(
                ErrorKind.EXISTS,
                f"attempt {params.attempt} of sequence {params.sequence_id!r} already has a stream on this worker, or further "
                "answers of one of both would have the other's name: ask with another sequence_id, or a larger attempt",
            )
        return max_tokens

    def abort(self, request: Request) -> None:
        """The reader has gone: end the request and free its blocks. No effect if it has ended."""
        self._break_off(request, CANCELLED)
        self.changed_for_link.set()

    def give_up_reader(self, request: Request, seconds: float) -> None:
        """The reader has taken nothing for `seconds`: end the request, free its blocks and drop unread chunks. The stream fails
        even after its last token, since it is incomplete without them. No effect if it has failed before."""
        num_tokens = request.num_generated_in_all
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
        self._wake.set()  # blocks may be back already: a fork that ends may leave its own in the reserve
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
        copies = self.scheduler.take_copies()
        step = as_step(batch, copies)
        loop = asyncio.get_running_loop()
        launched_at = self._clock()
        try:
            running = loop.run_in_executor(self._model_thread, self._runner.execute, step)
            self._deliver()
            results = await running
        except Exception as error:
            log.exception("step failed", num_sequences=len(batch))
            self.cache.fail_step(sequences)
            for request in [scheduled.request for scheduled in batch] + [fork.request for fork in copies]:
                self._fail(request, EngineError(ErrorKind.INTERNAL, f"the model step failed: {type(error).__name__}"))
            return
        now = self._clock()
        num_tokens = sum(part.num_forwarded_tokens for part in batch)
        num_decodes = sum(part.num_tokens == 1 and part.request.num_generated > 0 for part in batch)
        self.stats.on_step(len(batch), num_tokens, num_decodes, now - launched_at)
        self._admission.rate.note(num_tokens, now - launched_at, now)
        self._finish_step(batch, results, now)

    def _finish_step(self, batch: list[Scheduled], results: list[PartResult], now: float) -> None:
        computed = [results_of.computed(scheduled, result) for scheduled, result in zip(batch, results, strict=True)]
        self.cache.end_step(computed, now, num_added_later=sum(map(results_of.num_added_later, results)))
        for scheduled, result in zip(batch, results, strict=True):
            # A request may have been aborted while its step ran.
            if self.scheduler.find(scheduled.sequence.id) is scheduled.request:
                self._take(scheduled, result, now)

    def _take(self, scheduled: Scheduled, result: PartResult, now: float) -> None:
        """Give the request its result of the step. Its reader gets the token after the next step is launched."""
        request = scheduled.request
        if result.bad_logits is not None:
            log.warning(
                "no token can be sampled", sequence_id=request.params.sequence_id, **result.bad_logits._asdict()
            )
            self._fail(request, results_of.error_of(result.bad_logits))
            return
        request.on_prompt_logprobs(result.prompt_logprobs)
        request.times.on_computed(scheduled.sequence.num_computed_tokens, now)
        if isinstance(request, BeamRequest):
            if scheduled.samples:
                self._take_row(request, scheduled.sequence, result, now)
            return
        if result.token is None:
            return
        self.stats.on_token(request, now)
        for answer, token in results_of.next_tokens(self.scheduler, self.cache, request, result):
            if answer is not request:  # it has its first token at the same time as the first answer
                self.stats.num_generated_tokens += 1
            if answer.take(token):
                self._remove(answer)
            self._undelivered.append((answer, token, now))

    def _take_row(self, request: BeamRequest, sequence: CacheSequence, result: PartResult, now: float) -> None:
        try:
            if not request.take_row(sequence, result.candidates):
                return
            reason = request.finish() if request.is_over else None
        except Exception as error:
            self._fail_to_decode(request, error)
            return
        self.stats.on_token(request, now)
        if reason is not None:
            self._remove(request)
            self._on_finished(request, reason, now)
            self.changed_for_link.set()

    def _deliver(self) -> None:
        """Pass on the tokens of the last step, now that the next one runs: decoding text takes longer than all else between two
        steps. A request that a stop string ends is in that next step already; its result there is dropped."""
        undelivered, self._undelivered = self._undelivered, []
        for request, token, now in undelivered:
            if not request.stream.is_finished:  # else it has failed since
                self._pass_on(request, token, now)

    def _pass_on(self, request: Request, token: SampledToken, now: float) -> None:
        """Pass on one token. An error in one text ends that request, not the engine."""
        is_running = self._is_running(request)
        try:
            if not request.deliver(token):
                return
        except Exception as error:
            self._fail_to_decode(request, error)
        else:
            assert request.finish_reason is not None
            if request.stream.is_finished:
                self._on_finished(request.answers[0], request.finish_reason, now)
            if is_running:
                self._remove(request)
        self.changed_for_link.set()

    def _fail_to_decode(self, request: Request, error: Exception) -> None:
        log.exception("token could not be decoded", sequence_id=request.params.sequence_id)
        if not any(self._is_running(answer) for answer in request.answers):
            self.stats.ended[ErrorKind.INTERNAL.name.lower()] += 1
        self._fail(request, EngineError(ErrorKind.INTERNAL, f"the text could not be decoded: {type(error).__name__}"))

    def _on_finished(self, request: Request, reason: EndReason, now: float) -> None:
        """Count a request whose answers are all complete, by its first one; the last one ended for that reason."""
        self.stats.on_finished(request, reason.name.lower(), now)
        self._admission.on_finished(request)

    def _take_events(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, events.TableGranted):
                if request := self.scheduler.on_granted(event.sequence):
                    self.stats.on_granted(request, self._clock())
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
        if request is not None and sequence in request.sequences:
            self._fail(request, error)

    def _fail(self, request: Request, error: EngineError) -> None:
        request.stream.fail(error)
        self._break_off(request, error.kind.name.lower())

    def _break_off(self, request: Request, outcome: str) -> None:
        """End all answers of the request that have not ended; it counts once."""
        running = [answer for answer in request.answers if self._is_running(answer)]
        if running:
            self.stats.ended[outcome] += 1
        for answer in running:
            self._remove(answer)

    def _is_running(self, request: Request) -> bool:
        """Whether it has not ended: it runs or waits."""
        return self.scheduler.find(request.sequence.id) is request
