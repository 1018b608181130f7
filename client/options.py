"""The options of generate() and chat()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvpool.protocol.sampling import SamplingOptions

__all__ = ["GenerateOptions", "SamplingOptions"]


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of generate() and chat(), all optional. None means the default: the value in the model's
    generation_config.json (`Model.default_options`), or else the one given here. The next token is chosen by logit_bias, penalties,
    forbidden and forced ids, temperature, and then by the options that keep only some tokens, in the order of this list."""

    default_temperature: float
    """Temperature if neither this request nor the model's files have one; 0 by default."""
    n: int
    """Number of answers to the prompt, which is computed once; 1, the default, to 128. Answer k draws with seed + k, so it equals
    the answer to a single request with that seed. Chunks have the `index` of their answer. With num_beams they are the n best
    texts."""
    num_beams: int
    """Number of beams of a beam search, as in transformers, at most 64: so many texts are followed side by side, and the best ones
    come when all have ended. 1, the default: no search. A temperature above 0 is refused with it."""
    length_penalty: float
    """Power in a beam search, in [-6, 6]: a text's score is the sum of its log-probabilities divided by its length to this power. 1
    is the default; above 0 favours long texts."""
    early_stopping: bool | Literal["never"]
    """When a beam search ends that has found as many texts as beams. False, the default: when no beam, at its present length, is
    better than the worst of these texts; True: at once; "never": when no beam can become better."""
    max_tokens: int | None
    """Most tokens to generate. None: as many as the model's longest sequence leaves, unless its files have a number."""
    min_tokens: int
    """Tokens before which no id that ends the text is drawn, and stop strings have no effect; 0, the default: none."""
    stop: str | Sequence[str]
    """Strings that end the text and are not part of it, at most 16 of at most 256 bytes. None, or an empty list: the default."""
    stop_token_ids: Sequence[int]
    """Ids that end the text, in addition to the model's own; at most 256."""
    ignore_eos: bool
    """Whether to continue after the model's end-of-text ids; False by default."""
    logprobs: int | None
    """Log-probabilities to return. None, the default: none; 0: of the sampled tokens; n, at most 20: also of the n most likely
    ones."""
    prompt_logprobs: int | None
    """Log-probabilities of the prompt's tokens to return, as for logprobs. Such a request uses no cached prefix, since the cache
    has no logits."""
    echo: bool
    """Whether the text begins with the prompt's; the tokens are only those of the answer. False by default."""
    timeout: float | None
    """Seconds from the start of the call to the last token. None: the timeout of the client's config."""
    model: str | None
    """Name or fingerprint of the model. None: the one that all workers serve."""
    adapter: str
    """Name of the adapter to use; empty, the default: none."""
    tenant_salt: str
    """Salt of the tenant: tenants with different salts never share blocks. Empty by default."""
    priority: int
    """Smaller is served earlier and preempted later, on workers with --scheduling-policy priority; 0, the default: neutral."""
    tenant: str
    """Name of the tenant: a worker shares its steps fairly between the tenants of one priority. To share no blocks either, set
    tenant_salt."""
    boundaries: Sequence[int]
    """Lengths of the prompt, in tokens, after which other prompts will continue differently, at most 8. Models with a sliding
    window or recurrent layers keep the KV or state there. A chat has one at the end of its system prompt by default."""
    explain: bool
    """Whether to ask the manager, before the request is sent to a worker, why the cache cannot serve more of the prompt. The answer
    is the stream's `explanation`; the request does not fail without it. False by default."""
