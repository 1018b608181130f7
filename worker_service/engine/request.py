"""One generation, from submission to its last token."""

from __future__ import annotations

from collections.abc import Sequence as List
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tokenizers import Tokenizer

from kvpool.protocol.answers import answer_id, answer_seed
from kvpool.v1 import worker_pb2

from ..cache.engine_cache import EngineCache
from ..cache.sequence import CacheSequence
from ..step import (
    BlockCopy,
    EncoderBlocks,
    PromptRows,
    RowLogprobs,
    SampledToken,
    SamplingParams,
    SequencePart,
)
from ..token_counts import TokenCounts
from .beam_search import BeamParams
from .detokenizer import TextDecoder
from .request_times import RequestTimes
from .stream import EndReason, StreamChunk, TokenStream
from .token_rules import NextIds, TokenRules


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """A caller's request, checked by the codec."""

    sequence_id: str
    """Chosen by the client; one live stream per (sequence_id, attempt)."""
    attempt: int
    token_ids: list[int]
    """The beginning of the text: the prompt; with an encoder, what its decoder begins with and the delivered tokens."""
    num_delivered_tokens: int = 0
    """Tokens at the end of `token_ids` that an earlier attempt has delivered, with their text; fewer than all."""
    encoder_token_ids: list[int] = field(default_factory=list)
    """The prompt of a model with an encoder, which is the encoder's input; empty without an encoder."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    """Largest number of tokens to generate; 0: as many as max_model_len leaves."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the text, in addition to the model's own."""
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    """The model's end-of-text ids do not end the text."""
    min_tokens: int = 0
    """Before this many tokens, delivered ones included, no id that ends the text is drawn, and no stop string counts."""
    num_prompt_logprobs: int | None = None
    """None: no log-probabilities of the prompt; 0: of its tokens; n: also of the n most likely tokens at each position."""
    echo: bool = False
    """Start the text with the prompt's, unless an earlier attempt has delivered tokens."""
    tenant_salt: str = ""
    priority: int = 0
    """Smaller is served earlier, and preempted later, with the policy `priority`."""
    tenant: str = ""
    """Steps are shared fairly between the tenants of one priority."""
    boundaries: tuple[int, ...] = ()
    """Lengths of the prompt, in tokens, from where other prompts will go on."""
    num_answers: int = 1
    """Texts that begin with the prompt: the further ones are forks of the first, or the next best beams."""
    beams: BeamParams | None = None
    """Search the best texts, instead of sampling."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt as the request states it, with delivered tokens."""
        if self.encoder_token_ids:
            return len(self.encoder_token_ids) + self.num_delivered_tokens
        return len(self.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether to return log-probabilities of the prompt: an attempt that delivered tokens has returned them already."""
        return self.num_prompt_logprobs is not None and not self.num_delivered_tokens

    def text_decoder(self, tokenizer: Tokenizer) -> TextDecoder:
        return TextDecoder(
            tokenizer,
            self.token_ids,
            self.stop_strings,
            num_delivered=self.num_delivered_tokens,
            min_tokens=self.min_tokens,
            echo=self.echo,
        )


class Request:
    """A request that the engine has accepted: one text, or one of several that share their prompt and their reader."""

    def __init__(
        self,
        params: GenerationParams,
        sequence: CacheSequence,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        decoder: TextDecoder | None,
    ) -> None:
        self.params = params
        self.sequence = sequence
        self.index = 0
        self.answers = [self]
        """All answers that there are so far, this one included; one list for all of them."""
        self.num_forks_due = params.num_answers - 1
        """Answers that begin when the prompt is computed."""
        self._expect_forks()
        self.rank = Rank(0, 0)
        """Place of the request in the scheduler's order. The scheduler sets it and `payer`."""
        self.payer = Payer(0, params.tenant)
        self.stream = TokenStream(params.num_answers)
        """The stream of all answers."""
        self.num_prompt_tokens = params.num_prompt_tokens
        self.num_cached_tokens = 0
        """Prompt tokens served from the cache at the first admission."""
        self.num_preemptions = 0
        self.num_generated = 0
        self.finish_reason: EndReason | None = None
        """None until it finishes, and if it is aborted or fails."""
        self.times = RequestTimes()
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._decoder = decoder
        self.has_begun = False
        """Whether it was ever granted a block table; still true after preemption."""
        self._num_prompt_returned = 0
        """Prompt tokens whose log-probabilities were returned; preemption does not reset it."""
        self._counts: TokenCounts | None = None
        if params.sampling.has_penalties:
            num_prompt = len(params.token_ids) - params.num_delivered_tokens
            self._counts = TokenCounts(params.token_ids[:num_prompt], params.token_ids[num_prompt:])
        self._rules = self._rules_of(params.token_ids)

    @property
    def sequences(self) -> tuple[CacheSequence, ...]:
        """All sequences that it has now."""
        return (self.sequence,)

    @property
    def num_places(self) -> int:
        """Sequences that it will have in the batch."""
        return 1 + self.num_forks_due

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not computed, those of the encoder's input included; one while it decodes."""
        return self.sequence.num_uncomputed_tokens

    @property
    def num_generated_in_all(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_generated for answer in self.answers)

    def usage(self) -> worker_pb2.Usage:
        """Token counts and preemptions so far; where the time went once it has finished."""
        return worker_pb2.Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated,
            num_preemptions=self.num_preemptions,
            times=None if self.finish_reason is None else self.times.totals(),
        )

    def on_granted(self) -> None:
        """Its sequence has a block table; the first time, report to the reader how much the cache served."""
        if not self.has_begun:
            self.has_begun = True
            self.num_cached_tokens = self.sequence.num_cached_tokens
            if self.params.encoder_token_ids:
                self.num_cached_tokens = self.sequence.num_encoder_tokens if self.sequence.encoder_cached else 0
            self.stream.put(StreamChunk(0, usage=self.usage()))
            if self.params.wants_prompt_logprobs:
                self.on_prompt_logprobs([None])

    def part(self, sequence: CacheSequence, num_tokens: int, *, samples: bool) -> SequencePart:
        """The part in a step of one of its sequences, which computes `num_tokens` more of its tokens and, if it `samples`, the next
        one."""
        start = sequence.num_computed_tokens
        following = self._following(sequence) if samples else NextIds()
        return SequencePart(
            token_ids=sequence.tokens[start : start + num_tokens],
            start=start,
            block_tables=sequence.block_tables,
            sampling=self.params.sampling if samples else None,
            banned_ids=following.banned,
            forced_ids=following.forced,
            counts=self._counts,
            prompt_rows=self._prompt_rows(start, start + num_tokens),
            state=sequence.state_use(start + num_tokens),
            encoder=self._encoder_blocks(sequence),
            forks=[self._fork_params(index).sampling for index in range(1, 1 + self.num_forks_due)] if samples else (),
        )

    def _encoder_blocks(self, sequence: CacheSequence) -> EncoderBlocks | None:
        """The blocks with the KV of the encoder's output, and the encoder's input if it is to run before the part; None: there is
        no encoder."""
        if (unit := sequence.unit) is None:
            return None
        token_ids = self.params.encoder_token_ids if unit.num_tokens_to_encode else ()
        return EncoderBlocks(unit.table, sequence.num_encoder_tokens, token_ids)

    def _rules_of(self, tokens: List[int]) -> TokenRules | None:
        """The rules for a text that has these tokens; None: any token may follow."""
        params = self.params
        if not params.sampling.has_rules:
            return None
        prompt = params.token_ids[: len(params.token_ids) - params.num_delivered_tokens]
        return TokenRules(params.sampling, tokens, params.encoder_token_ids or prompt, self._stop_token_ids)

    def _rules_for(self, sequence: CacheSequence) -> TokenRules | None:
        """The rules for the next token of one of its sequences."""
        return self._rules

    def _following(self, sequence: CacheSequence) -> NextIds:
        """The ids that are banned or forced as the next token."""
        num_before = self.params.num_delivered_tokens + self.num_generated
        is_too_short = num_before < self.params.min_tokens
        rules = self._rules_for(sequence)
        if rules is None:
            return NextIds(self._stop_token_ids if is_too_short else ())
        return rules.next(
            sequence.tokens,
            is_first=not num_before,
            is_last=self.num_generated + 1 >= self._max_tokens,
            may_end=not is_too_short,
        )

    def _prompt_rows(self, start: int, end: int) -> PromptRows | None:
        """Prompt log-probabilities to compute for start … end − 1, not returned yet."""
        num_top = self.params.num_prompt_logprobs
        if num_top is None or not self.params.wants_prompt_logprobs:
            return None
        # The logits of a position give the log-probability of the token after it.
        targets = self.params.token_ids[self._num_prompt_returned : end + 1]
        return PromptRows(self._num_prompt_returned - 1 - start, targets, num_top) if targets else None

    def on_prompt_logprobs(self, logprobs: List[RowLogprobs | None]) -> None:
        """Pass on log-probabilities of the prompt, to each answer as if it were alone."""
        if not logprobs:
            return
        self._num_prompt_returned += len(logprobs)
        for index in range(self.params.num_answers):
            self.stream.put(StreamChunk(0, prompt_logprobs=list(logprobs), index=index))

    def preempt(self, cache: EngineCache) -> None:
        """Give its blocks back, and be computed again from its tokens."""
        self.num_preemptions += 1
        self.sequence = cache.preempt(self.sequence)
        self._expect_forks()

    def _expect_forks(self) -> None:
        """Let the reserve have blocks for what will be forked."""
        self.sequence.num_forks_to_come = self.num_places - 1

    def _fork_params(self, index: int) -> GenerationParams:
        """The parameters of a request whose only text is the answer with that index."""
        params = self.params
        return replace(
            params,
            sequence_id=answer_id(params.sequence_id, index),
            sampling=replace(params.sampling, seed=answer_seed(params.sampling.seed, index)),
            num_answers=1,
        )

    def fork(self, cache: EngineCache, *, may_share: bool) -> AnswerFork:
        """The next answer, which shares the KV of the prompt, just computed. Its first token is to be taken next. Without blocks
        for it, or unless it `may_share`, it gets them like a request that was preempted."""
        index = len(self.answers)
        params = self._fork_params(index)
        forked = cache.fork(self.sequence, params.sequence_id) if may_share else None
        sequence = self.sequence.alone(params.sequence_id) if forked is None else forked.sequence
        decoder = None if self._decoder is None else self._decoder.copy()
        answer = Request(params, sequence, self._max_tokens, self._stop_token_ids, decoder)
        answer.rank, answer.payer = self.rank._replace(answer=index), self.payer
        answer.stream, answer.answers, answer.index = self.stream, self.answers, index
        answer.num_cached_tokens, answer.times = self.num_cached_tokens, copy(self.times)
        answer.has_begun, answer._num_prompt_returned = True, self._num_prompt_returned
        answer._counts = None if self._counts is None else self._counts.copy()
        answer._rules = None if self._rules is None else self._rules.copy()
        self.answers.append(answer)
        self.num_forks_due -= 1
        self.stream.put(StreamChunk(0, usage=answer.usage(), index=index))
        return AnswerFork(answer, () if forked is None else forked.copies)

    def take(self, token: SampledToken) -> bool:
        """Count the next token; returns whether none can follow it. `deliver` is to be called before the next one."""
        self.num_generated += 1
        if self._counts is not None:
            self._counts.add(token.token_id)
        if self._rules is not None:
            self._rules.add(token.token_id)
        return token.token_id in self._stop_token_ids or self.num_generated >= self._max_tokens

    def deliver(self, token: SampledToken) -> bool:
        """Pass on the token taken last, and the text that is certain; returns whether the text has ended, which may also be due to
        a stop string."""
        index = self.num_generated - 1
        if token.token_id in self._stop_token_ids:
            self._finish(StreamChunk(index, index=self.index), EndReason.STOP)
            return True
        chunk = StreamChunk(index, [token], index=self.index)
        if self._decoder is not None:
            chunk.text = self._decoder.add(token.token_id)
            if self._decoder.is_stopped:
                self._finish(chunk, EndReason.STOP)
                return True
        if self.num_generated >= self._max_tokens:
            self._finish(chunk, EndReason.LENGTH)
            return True
        self.stream.put(chunk)
        return False

    def _finish(self, chunk: StreamChunk, reason: EndReason) -> None:
        if self._decoder is not None:
            chunk.text += self._decoder.finish()
        chunk.finish_reason = self.finish_reason = reason
        chunk.usage = self.usage()
        self.stream.put(chunk)


class AnswerFork(NamedTuple):
    """One more answer of a request, or more beams of one."""

    request: Request
    """The answer; without the copies it has lost its text."""
    copies: List[BlockCopy]
    """Copies that the next step must make."""


class Rank(NamedTuple):
    """A request's place in a total order that never changes. Preemption takes the last, so the first running request always
    finishes."""

    level: int
    arrival: int
    """Number of the request in order of acceptance. Preemption does not change it."""
    answer: int = 0


class Payer(NamedTuple):
    """The account that a request's tokens are charged to."""

    level: int
    tenant: str
