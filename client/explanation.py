"""The manager's explanation of why a prompt is not served from the cache, as values and in words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, Self

from tokenizers import Tokenizer

from kvpool.v1 import cache_pb2

from .prompt import RoutedPrompt


class MissCause(StrEnum):
    """Why a worker would not serve a block from its cache."""

    UNKNOWN = "unknown"
    """This client does not know the cause: the manager is newer."""
    NEVER_SEEN = "never_seen"
    """No block that the manager remembers held these tokens after this prefix."""
    EVICTED = "evicted"
    """The block was probably evicted. The manager remembers hashes, and two can be equal by chance."""
    OTHER_ROOT = "other_root"
    """The tokens are cached under another adapter, model, input, block size or, where the manager may say so, salt."""
    BEING_COMPUTED = "being_computed"
    """A sequence is computing them now."""
    PARTIAL_TAIL = "partial_tail"
    """The rest is shorter than a block or, with recurrent layers, than the distance of two snapshots."""
    LAST_TOKEN = "last_token"
    """The last token, and its block with it, is always computed."""
    ON_ANOTHER_WORKER = "on_another_worker"
    """Another worker has the block, this one does not."""
    WINDOW_NOT_KEPT = "window_not_kept"
    """The layers that see everything have the block, but no sliding window that ends there is kept."""
    SNAPSHOT_NOT_KEPT = "snapshot_not_kept"
    """The attention layers have the block, but no snapshot of the recurrent layers' state is kept there."""


_CAUSES: Final = {
    cache_pb2.MissCause.Value(f"MISS_CAUSE_{cause.name}"): cause
    for cause in MissCause
    if cause is not MissCause.UNKNOWN
}
"""Causes by their numbers in messages."""
_NOT_KEPT: Final = frozenset({MissCause.WINDOW_NOT_KEPT, MissCause.SNAPSHOT_NOT_KEPT})


@dataclass(frozen=True, slots=True)
class Miss:
    """The first token that a worker would not serve, and why. Fields that do not belong to the cause are None."""

    position: int
    """Position of the token in the prompt, from 0."""
    cause: MissCause
    """The first of the causes that holds."""
    evicted_seconds_ago: float | None = None
    """EVICTED: seconds since, to about half a second."""
    evicted_for: str | None = None
    """EVICTED: sequence that needed the block; None: a worker's reserve, or a sequence with another salt, needed it."""
    leader: str | None = None
    """BEING_COMPUTED: sequence that computes it."""
    leader_position: int | None = None
    """BEING_COMPUTED: position up to which that sequence computes the prompt."""
    other_worker_id: str | None = None
    """The worker that has it or computes it, if it is another one."""
    other_model: str | None = None
    """OTHER_ROOT: fingerprint of the model."""
    other_adapter: str | None = None
    """OTHER_ROOT: name of the adapter; empty: none."""
    other_block_size: int | None = None
    """OTHER_ROOT: tokens per block."""
    other_salt: bool = False
    """OTHER_ROOT: whether the salts differ; reported only with the manager's --explain-across-salts."""
    num_passed_tokens: int | None = None
    """WINDOW_NOT_KEPT and SNAPSHOT_NOT_KEPT: tokens of the prompt that the other layers have."""

    @classmethod
    def from_proto(cls, miss: cache_pb2.Miss) -> Self:
        """Decode the manager's message."""
        cause = _CAUSES.get(miss.cause, MissCause.UNKNOWN)
        is_other, is_led = cause is MissCause.OTHER_ROOT, cause is MissCause.BEING_COMPUTED
        return cls(
            position=miss.position,
            cause=cause,
            evicted_seconds_ago=miss.evicted_ms_ago / 1000 if cause is MissCause.EVICTED else None,
            evicted_for=miss.evicted_for.sequence_id or None,
            leader=miss.leader.sequence_id or None,
            leader_position=miss.leader_position if is_led else None,
            other_worker_id=miss.other_worker_id or None,
            other_model=miss.other_root.model_fingerprint if is_other else None,
            other_adapter=miss.other_root.adapter if is_other else None,
            other_block_size=miss.other_block_size if is_other else None,
            other_salt=miss.other_salt,
            num_passed_tokens=miss.num_passed_tokens if cause in _NOT_KEPT else None,
        )


@dataclass(frozen=True, slots=True)
class WorkerExplanation:
    """How much of the prompt one worker would serve from its cache."""

    worker_id: str
    """Name of the worker."""
    num_cached_tokens: int
    """Tokens that an Allocate would serve from the cache now."""
    miss: Miss
    """Why it would serve no more."""
    encoder_cached: bool = False
    """Whether the worker has the encoder's output for the prompt; False without an encoder."""


@dataclass(frozen=True, slots=True)
class ClosestPrompt:
    """The cached prompt from which this one could gain most, or else the one with the longest common prefix."""

    num_equal_tokens: int
    """Tokens that both prompts begin with."""
    prompt_token: int | None
    """The first token that differs; None: this prompt ends there."""
    cached_token: int | None
    """Token of the cached prompt there."""
    num_different_tokens: int
    """Tokens of that block that differ."""
    num_prompts: int
    """Searched prompts that have `cached_token` there."""
    num_tokens_gained: int
    """Tokens that would be served in addition if the block did not differ."""
    truncated: bool
    """Whether the search was cut short: a closer prompt may exist."""

    @classmethod
    def from_proto(cls, closest: cache_pb2.ClosestPrompt) -> Self:
        """Decode the manager's message."""
        values = {field.name: getattr(closest, field.name) for field in fields(cls)}
        missing = {name: None for name in ("prompt_token", "cached_token") if not closest.HasField(name)}
        return cls(**(values | missing))


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much of a prompt each worker would serve from its cache at one moment, and why no more."""

    token_ids: tuple[int, ...]
    """Tokens of the prompt; for a model with an encoder, the first tokens of the decoder's text."""
    model_fingerprint: str
    """Fingerprint of the model that the prompt was tokenised for."""
    adapter: str
    """Name of the adapter; empty: none."""
    workers: tuple[WorkerExplanation, ...]
    """The workers that would serve most tokens, in descending order; at most 64."""
    num_workers: int
    """Number of all workers that would take the prompt."""
    closest: ClosestPrompt | None
    """The closest cached prompt; None: no cached prompt shares its first token, or all of it is cached."""
    num_encoder_tokens: int = 0
    """Tokens of the prompt, which an encoder reads; 0 without an encoder."""

    @classmethod
    def from_proto(cls, response: cache_pb2.ExplainResponse, prompt: RoutedPrompt) -> Self:
        """Decode the manager's answer for `prompt`."""
        return cls(
            token_ids=tuple(prompt.token_ids),
            model_fingerprint=prompt.root.model_fingerprint,
            adapter=prompt.root.adapter,
            num_encoder_tokens=prompt.num_encoder_tokens,
            workers=tuple(
                WorkerExplanation(
                    worker.worker_id, worker.num_cached_tokens, Miss.from_proto(worker.miss), worker.encoder_cached
                )
                for worker in response.workers
            ),
            num_workers=response.num_workers,
            closest=ClosestPrompt.from_proto(response.closest) if response.HasField("closest") else None,
        )

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the best worker would serve; 0 if there is none."""
        return self.workers[0].num_cached_tokens if self.workers else 0

    def as_object(self) -> dict[str, Any]:
        """Return the explanation as JSON values, with the number of the prompt's tokens in place of the tokens. The names are part
        of the interface."""
        values = asdict(replace(self, token_ids=()))  # which would copy them one by one
        del values["token_ids"]
        return values | {"num_prompt_tokens": len(self.token_ids)}

    def sentences(self, tokenizer: Tokenizer | None = None) -> list[str]:
        """Explain in plain words: one sentence for each worker, then one about the closest prompt. Tokens are shown as text if
        there is a tokenizer."""
        if not self.workers:
            return ["No live worker takes this prompt."]
        sentences = [self._about(worker) for worker in self.workers]
        if self.num_workers > len(self.workers):
            sentences.append(f"{self.num_workers - len(self.workers)} more workers would serve no more of it.")
        closest = self._about_closest(tokenizer)
        return [*sentences, closest] if closest else sentences

    def _about(self, worker: WorkerExplanation) -> str:
        num_tokens = len(self.token_ids)
        served = f"{worker.worker_id} would serve {worker.num_cached_tokens:,} of {num_tokens:,} tokens from its cache"
        if self.num_encoder_tokens:
            has = "has" if worker.encoder_cached else "does not have"
            encoded = f"{worker.worker_id} {has} the encoder's output for the {self.num_encoder_tokens:,} tokens of the prompt"
            return f"{encoded}; of the decoder's text it {served.removeprefix(worker.worker_id + ' ')}: {self._why(worker.miss)}."
        return f"{served}: {self._why(worker.miss)}."

    def _why(self, miss: Miss) -> str:
        block, elsewhere = f"the block from token {miss.position:,} on", miss.other_worker_id
        match miss.cause:
            case MissCause.NEVER_SEEN:
                return f"{block} was never seen"
            case MissCause.EVICTED:
                age = _age(miss.evicted_seconds_ago or 0.0)
                why = f", to make room for {miss.evicted_for}" if miss.evicted_for else ""
                also = f"; {elsewhere} still has it" if elsewhere else ""
                return f"{block} was probably evicted {age} ago{why}{also}"
            case MissCause.OTHER_ROOT:
                return f"{block} is cached only {self._other_root(miss)} (on {elsewhere})"
            case MissCause.BEING_COMPUTED:
                where = f" on {elsewhere}" if elsewhere else ""
                return f"{miss.leader} is computing the tokens from {miss.position:,} to {miss.leader_position:,} now{where}"
            case MissCause.PARTIAL_TAIL:
                return "the rest does not fill a block or, with recurrent layers, what lies between two snapshots"
            case MissCause.LAST_TOKEN:
                return "the last token is always computed, and its block with it"
            case MissCause.ON_ANOTHER_WORKER:
                return f"{block} is cached on {elsewhere}, not here"
            case MissCause.WINDOW_NOT_KEPT:
                others = f"layers that see everything have {miss.num_passed_tokens:,} tokens"
                return f"{others}, but no sliding window that ends after token {miss.position:,} is kept whole"
            case MissCause.SNAPSHOT_NOT_KEPT:
                others = f"layers that attend have {miss.num_passed_tokens:,} tokens"
                return f"{others}, but no snapshot of the recurrent layers' state after token {miss.position:,} is kept"
            case MissCause.UNKNOWN:
                return f"{block} is not served, for a reason that this client does not know: update it"

    def _other_root(self, miss: Miss) -> str:
        parts = []
        if miss.other_model != self.model_fingerprint:
            parts.append(f"for another model ({(miss.other_model or '')[:12]})")
        if miss.other_adapter != self.adapter:
            parts.append(f"with the adapter {miss.other_adapter}" if miss.other_adapter else "without an adapter")
        if miss.other_salt:
            parts.append("under another tenant's salt")
        return " and ".join(parts) or f"in blocks of {miss.other_block_size:,} tokens, or with another input"

    def _about_closest(self, tokenizer: Tokenizer | None) -> str:
        closest = self.closest
        if closest is None or closest.prompt_token is None or closest.cached_token is None:
            return ""
        ours, theirs = _shown(closest.prompt_token, tokenizer), _shown(closest.cached_token, tokenizer)
        others = "a cached one has" if closest.num_prompts == 1 else f"{closest.num_prompts:,} cached ones have"
        sentence = f"Your prompt has {ours} where {others} {theirs}, at token {closest.num_equal_tokens:,}"
        if closest.num_tokens_gained:
            sentence += f"; after it {closest.num_tokens_gained:,} more tokens would have been served"
            if closest.num_different_tokens > 1:
                sentence += f", if {closest.num_different_tokens} tokens of that block were the same"
        return f"{sentence}."


def _shown(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Return the token's text in quotation marks, or its id if it has no text of whole characters."""
    text = "" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
    return json.dumps(text, ensure_ascii=False) if text and "\ufffd" not in text else f"token {token_id}"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
