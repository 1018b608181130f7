"""The engine: takes requests in, runs step after step, and passes tokens on.

All state belongs to the event loop; only the model's forward pass runs in a thread of its own, one step at a time. The loop never
waits for the manager while a step can run: what is to be said to it is said by the edge, beside the running step.
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
from .step import BadLogits, PartResult, StepRunner

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the engine, and what it needs to know of the model."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    """Largest sequence, prompt and generated tokens together."""
    eos_token_ids: frozenset[int] = frozenset()
    max_num_seqs: int = 64
    """Sequences in one batch."""
    max_num_batched_tokens: int = 2048
    """Tokens forwarded in one step at most."""
    max_mixed_prefill_tokens: int = 512
    """Tokens of prompts in one step at most while others decode."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.fcfs
    max_num_waiting: int = 1024
    """Requests that may wait; more are refused."""
    max_num_waiting_tokens: int = 1 << 22
    """Tokens of all prompts that may wait; more are refused, but one may always wait."""
    prefix_caching: bool = True
    """Whether prompts may be served from the cache."""


class Engine:
    """Continuous batching over one model and one cache side. `model_thread`: the one thread that runs the steps; the engine
    shuts it down at its end."""

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
            policy=settings.scheduling_policy,
        )
        self._admission = Admission(
            max_num_waiting=settings.max_num_waiting, max_num_waiting_tokens=settings.max_num_waiting_tokens
        )
        self.stats = EngineStats()
        self.changed_for_link = asyncio.Event()
        """Set when there may be something to tell the manager."""
        self.drain_asked = asyncio.Event()
        """Set when the manager wants this worker to leave."""
        self.drain_grace_seconds: float | None = None
        """What it gives the running requests to end; None: as much as the worker's own settings do."""
        self.is_draining = False
        """No further requests are taken."""
        self._emptied = asyncio.Event()
        self._runner = runner
        self._clock = clock
        self._wake = asyncio.Event()
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
        making_way = self._admission.check(self.scheduler.waiting, payer, len(params.token_ids), self._clock())
        # KV hits have no logits.
        may_hit = self.settings.prefix_caching and not params.tells_prompt_logprobs
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
        )
        decoder = None
        if self.tokenizer is not None:
            decoder = params.text_decoder(self.tokenizer)
            if decoder.is_stopped:
                raise invalid(
                    "num_delivered_tokens",
                    "a stop string stands in the delivered tokens already: there is no more to come",
                )
        request = Request(params, sequence, max_tokens, ending_ids, decoder)
        request.times.arrived_at = self._clock()
        for other in making_way:
            self._fail(other, self._admission.made_way(self.scheduler.waiting, self._clock()))
        self.scheduler.add(request)
        self.changed_for_link.set()
        return request

    def _check(self, params: GenerationParams) -> int:
        """Refuse what cannot be served; returns how many tokens may be generated."""
        settings = self.settings
        if self.is_draining:
            raise EngineError(
                ErrorKind.DRAINING, "this worker is about to leave and takes no further requests; ask another one"
            )
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
                f"{num_prompt} prompt tokens and {params.max_tokens} new ones exceed the {settings.max_model_len} that the model "
                f"takes; at most {room} can be generated",
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
        """ "As many as possible", limited by the model and by the pool."""
        cache = self.cache.settings
        return max(1, min(room, (cache.num_blocks - 1) * cache.block_size - num_prompt + 1))

    def _check_fits(self, num_prompt: int, max_tokens: int) -> None:
        cache = self.cache.settings
        num_blocks = -(-(num_prompt + max_tokens - 1) // cache.block_size)
        if num_blocks > cache.num_blocks - 1:
            raise EngineError(
                ErrorKind.NEVER_FITS,
                f"{num_prompt} prompt tokens and {max_tokens} new ones need {num_blocks} blocks of {cache.block_size}; this worker "
                f"has {cache.num_blocks - 1}: lower max_tokens, or give the worker more (--num-blocks, --kv-cache-memory)",
                field="max_tokens",
            )

    def abort(self, request: Request) -> None:
        """The reader has gone: end the request and free its blocks. Nothing happens if it has ended."""
        self._break_off(request, CANCELLED)
        self.changed_for_link.set()

    def give_up_reader(self, request: Request, seconds: float) -> None:
        """The reader has taken nothing for `seconds`: end the request, free its blocks and drop what waits for it. After the last
        token too, since what is dropped would be missing. Nothing happens if the stream has failed before."""
        num_tokens = request.num_generated
        request.stream.give_up(
            EngineError(
                ErrorKind.SLOW_READER,
                f"the reader took nothing for {seconds:g} s while there was something for it, {num_tokens} tokens were generated: "
                "read faster or ask for less at a time, or give the worker a longer --reader-seconds",
            )
        )
        self._break_off(request, ErrorKind.SLOW_READER.name.lower())
        self.changed_for_link.set()

    def load(self) -> common_pb2.WorkerLoad:
        """What the worker is busy with."""
        scheduler = self.scheduler
        return common_pb2.WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_uncomputed_tokens=scheduler.num_uncomputed_tokens,
        )

    # -- leaving

    def begin_drain(self) -> None:
        """Take no further requests, and send those away that have nothing yet: another worker serves them sooner."""
        self.is_draining = True
        for request in self.scheduler:
            if not request.has_begun:
                self._fail(
                    request,
                    EngineError(ErrorKind.DRAINING, "this worker is about to leave and has not begun with the request"),
                )
        self._note_if_empty()
        self.changed_for_link.set()

    async def wait_until_empty(self) -> None:
        """After `begin_drain`: until no request is left."""
        await self._emptied.wait()

    def fail_all(self, error: EngineError) -> None:
        """End every request now."""
        for request in self.scheduler:
            self._fail(request, error)
        self.changed_for_link.set()

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if self.is_draining and not (self.scheduler.num_running or self.scheduler.num_waiting):
            self._emptied.set()

    # -- running

    def on_cache_changed(self) -> None:
        """The edge has handed something to the cache side."""
        self._wake.set()

    async def run(self) -> None:
        """Run steps as long as there are any; for ever. Cancelling it waits for the running step."""
        try:
            while True:
                self._wake.clear()
                self._take_events()
                batch = self.scheduler.schedule()
                self.changed_for_link.set()
                if batch:
                    await self._run_step(batch)
                else:
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
            tokens = await loop.run_in_executor(self._model_thread, self._runner.execute, step)
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
        self._finish_step(batch, tokens, now)

    def _count_step(self, batch: list[Scheduled], seconds: float, now: float) -> None:
        num_tokens = num_decodes = 0
        for scheduled in batch:
            num_tokens += scheduled.num_tokens
            num_decodes += scheduled.num_tokens == 1 and scheduled.request.num_generated > 0
        self.stats.on_step(len(batch), num_tokens, num_decodes, seconds)
        self._admission.on_step(num_tokens, seconds, now)

    def _finish_step(self, batch: list[Scheduled], results: list[PartResult], now: float) -> None:
        computed = [_computed(scheduled, result) for scheduled, result in zip(batch, results, strict=True)]
        self.cache.end_step(computed, now)
        for scheduled, result in zip(batch, results, strict=True):
            request = scheduled.request
            # A request may have been aborted while its step ran.
            if self.scheduler.find(scheduled.sequence.id) is request:
                self._pass_on(request, result, now)

    def _pass_on(self, request: Request, result: PartResult, now: float) -> None:
        """Give the request what the step made for it. What goes wrong with one text ends that request, never the engine."""
        if result.bad_logits is not None:
            log.warning("no token can be chosen", sequence_id=request.params.sequence_id, **result.bad_logits._asdict())
            self._fail(request, _error_of(result.bad_logits))
            return
        try:
            request.on_prompt_logprobs(result.prompt_logprobs)
            if result.token is None:
                return
            self.stats.on_token(request, now)
            if request.on_token(result.token):
                assert request.finish_reason is not None
                self.stats.on_finished(request, request.finish_reason.value, now)
                self._admission.on_finished(request)
                self._remove(request)
        except Exception as error:
            log.exception("token could not be passed on", sequence_id=request.params.sequence_id)
            self._fail(request, EngineError(ErrorKind.INTERNAL, f"the text could not be made: {type(error).__name__}"))

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
                    EngineError(ErrorKind.SUPERSEDED, "this sequence goes on elsewhere under a larger attempt"),
                )
            elif isinstance(event, events.DrainAsked):
                self.drain_grace_seconds = event.grace_seconds
                self.drain_asked.set()
            elif isinstance(event, events.SessionLost):
                # Nothing is lost with it: what runs goes on, and the next session is told.
                log.info("session ended", why=event.why, num_running=self.scheduler.num_running)
            else:
                self._forget_everything(event)

    def _on_granted(self, sequence: CacheSequence) -> None:
        self.scheduler.on_granted(sequence)
        request = self.scheduler.find(sequence.id)
        if request is not None and request.sequence is sequence:
            self.stats.on_granted(request, self._clock())

    def _forget_everything(self, event: events.GivenUp) -> None:
        """No step is running here: end all streams, forget all blocks; the edge then registers again."""
        num_requests = self.scheduler.num_running + self.scheduler.num_waiting
        tell = log.error if event.is_defect else log.warning
        tell("all blocks are given up", why=event.why, num_requests=num_requests)
        self.fail_all(EngineError(ErrorKind.UNAVAILABLE, f"this worker has to give up its blocks: {event.why}"))
        self.cache.reset()
        self.changed_for_link.set()

    def _fail_sequence(self, sequence: CacheSequence, error: EngineError) -> None:
        request = self.scheduler.find(sequence.id)
        # The name may belong to another request by now, or this one may be in a later round.
        if request is not None and request.sequence is sequence:
            self._fail(request, error)

    def _fail(self, request: Request, error: EngineError) -> None:
        request.stream.fail(error)
        self._break_off(request, error.kind.name.lower())

    def _break_off(self, request: Request, outcome: str) -> None:
        if self.scheduler.find(request.sequence.id) is request:
            self.stats.on_broken_off(outcome)
            self._remove(request)


def _computed(scheduled: Scheduled, result: PartResult) -> Computed:
    sequence = scheduled.sequence
    if result.bad_logits is not None:
        # KV that led to such logits should be nobody's hit.
        return Computed(sequence, sequence.num_computed_tokens, None)
    token_id = None if result.token is None else result.token.token_id
    return Computed(sequence, sequence.num_computed_tokens + scheduled.num_tokens, token_id)


def _error_of(bad: BadLogits) -> EngineError:
    """Why a request cannot go on. Neither kind is asked of another worker: it would come to the same."""
    what = f"no token can be chosen for position {bad.position}: the largest logit is {bad.largest:g}"
    if not bad.is_adjusted:
        return EngineError(
            ErrorKind.INTERNAL,
            f"{what} where a finite number was needed. The model gives that for these tokens on every worker: change the prompt, "
            "or look for weights that are not finite, or that overflow in the worker's dtype (--dtype)",
        )
    if bad.largest < 0:
        return invalid(
            "stop.min_tokens",
            f"{what}; the ids that would end the text are ruled out before so many tokens, and the model rules out all others: "
            "lower min_tokens, or give fewer stop_token_ids",
        )
    return invalid(
        "sampling.repetition_penalty",
        f"{what}, which the model's own is not: bias and penalties have carried it beyond float32; take a penalty nearer to 1",
    )
