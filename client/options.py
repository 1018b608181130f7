"""How an answer is to be generated: the options of generate() and chat(), and their checked form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpool.v1 import worker_pb2

from .errors import InvalidRequest
from .sampling import SamplingOptions, SamplingSettings, require

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_BYTES: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGPROBS: Final = 20
MAX_NAME_BYTES: Final = 256


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of generate() and chat(), all optional."""

    max_tokens: int | None
    """Tokens to generate at most. None: as many as the model's longest sequence leaves."""
    min_tokens: int
    """Before so many tokens no id that ends the text is drawn, and stop strings do not count; 0, the default: from the first."""
    stop: str | Sequence[str]
    """Strings that end the text; not part of it. At most 16, each at most 256 bytes."""
    stop_token_ids: Sequence[int]
    """Ids that end the text, beside the model's own; at most 256."""
    ignore_eos: bool
    """Go on behind the model's end-of-text ids."""
    logprobs: int | None
    """None: no log-probabilities; 0: of the sampled tokens; n: also of the n most likely ones. At most 20."""
    prompt_logprobs: int | None
    """The same of the prompt's tokens. Such a request takes nothing from the cache: what is in it has no logits."""
    echo: bool
    """Begin the text with the prompt's. The tokens are the answer's alone."""
    timeout: float | None
    """Seconds from the start of the call to the last token. None: the client's own."""
    model: str | None
    """Name or fingerprint of the model. None: the one that all workers serve."""
    adapter: str
    """Name of the adapter to use; empty, the default: none."""
    tenant_salt: str
    """Tenants with different salts never share blocks."""
    priority: int
    """Of a worker with --scheduling-policy priority: smaller is served earlier, and preempted later. 0, the default: as usual."""
    tenant: str
    """On whose behalf; a worker shares its steps fairly between tenants of one priority. Whoever must not share blocks either sets
    tenant_salt."""


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """The options, checked and with every default filled in."""

    max_tokens: int
    """0: as many as the model's longest sequence leaves."""
    sampling: SamplingSettings
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    timeout: float | None
    model: str | None
    adapter: str
    tenant_salt: str
    priority: int
    tenant: str

    @classmethod
    def from_options(cls, options: GenerateOptions) -> GenerateSettings:
        """Check the options; InvalidRequest names the first one that is wrong and what it may be."""
        unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
        if unknown:
            raise InvalidRequest(
                f"unknown option {unknown[0]!r}; there are {', '.join(GenerateOptions.__annotations__)}",
                reason="BAD_FIELD",
            )
        max_tokens = options.get("max_tokens")
        min_tokens = options.get("min_tokens", 0)
        stop = options.get("stop", ())
        logprobs, prompt_logprobs = options.get("logprobs"), options.get("prompt_logprobs")
        timeout = options.get("timeout")
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        stop_token_ids = tuple(options.get("stop_token_ids", ()))
        require(max_tokens is None or 1 <= max_tokens < 2**32, "max_tokens", max_tokens, "at least 1, or None")
        largest = max_tokens or 2**32 - 1
        require(0 <= min_tokens <= largest, "min_tokens", min_tokens, "at least 0 and at most max_tokens")
        require(len(stop_strings) <= MAX_STOP_STRINGS, "stop", len(stop_strings), f"{MAX_STOP_STRINGS} strings at most")
        for string in stop_strings:
            fits = 0 < len(string.encode()) <= MAX_STOP_STRING_BYTES
            require(fits, "stop", string, f"strings of 1 to {MAX_STOP_STRING_BYTES} bytes")
        num_ids = len(stop_token_ids)
        require(num_ids <= MAX_STOP_TOKEN_IDS, "stop_token_ids", num_ids, f"{MAX_STOP_TOKEN_IDS} ids at most")
        require(all(0 <= token < 2**32 for token in stop_token_ids), "stop_token_ids", stop_token_ids, "token ids")
        for name, wanted in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
            require(wanted is None or 0 <= wanted <= MAX_LOGPROBS, name, wanted, f"None or 0 … {MAX_LOGPROBS}")
        require(timeout is None or 0 < timeout <= 86_400, "timeout", timeout, "in (0, 86400] seconds, or None")
        priority = options.get("priority", 0)
        require(-(2**31) <= priority < 2**31, "priority", priority, "in -2**31 … 2**31 − 1")
        names = {
            "adapter": options.get("adapter", ""),
            "tenant_salt": options.get("tenant_salt", ""),
            "tenant": options.get("tenant", ""),
        }
        for name, value in names.items():
            require(len(value.encode()) <= MAX_NAME_BYTES, name, value, f"{MAX_NAME_BYTES} bytes at most")
        return cls(
            max_tokens=max_tokens or 0,
            sampling=SamplingSettings.from_options(options),
            min_tokens=min_tokens,
            stop_strings=stop_strings,
            stop_token_ids=stop_token_ids,
            ignore_eos=options.get("ignore_eos", False),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            echo=options.get("echo", False),
            timeout=timeout,
            model=options.get("model"),
            adapter=names["adapter"],
            tenant_salt=names["tenant_salt"],
            priority=priority,
            tenant=names["tenant"],
        )

    def request(
        self,
        *,
        token_ids: Sequence[int],
        num_delivered: int,
        sequence_id: str,
        attempt: int,
        model_fingerprint: str,
    ) -> worker_pb2.GenerateRequest:
        """The message for one attempt. `token_ids`: the prompt and behind it the `num_delivered` tokens of earlier
        attempts, fewer than max_tokens."""
        assert not 0 < self.max_tokens <= num_delivered, (self.max_tokens, num_delivered)
        return worker_pb2.GenerateRequest(
            sequence_id=sequence_id,
            attempt=attempt,
            token_ids=worker_pb2.TokenIds(ids=token_ids),
            adapter=self.adapter,
            tenant_salt=self.tenant_salt,
            priority=self.priority,
            tenant=self.tenant,
            model_fingerprint=model_fingerprint,
            sampling=self.sampling.message(),
            stop=worker_pb2.StopConditions(
                max_tokens=self.max_tokens - num_delivered if self.max_tokens else 0,
                stop_token_ids=self.stop_token_ids,
                stop_strings=self.stop_strings,
                ignore_eos=self.ignore_eos,
                min_tokens=self.min_tokens,
            ),
            logprobs=self.logprobs,
            # Of a continuation the worker knows that both were told: num_delivered_tokens says so.
            prompt_logprobs=self.prompt_logprobs,
            echo=self.echo,
            num_delivered_tokens=num_delivered,
        )
