"""How an answer is to be generated: the options of generate() and chat()."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of generate() and chat(), all optional; None is the default: what the model's generation_config.json asks
    for (`Model.default_options`), or else what is said here. The next token is chosen by logit_bias, penalties, ids that must not
    or must follow, temperature, top_k, top_p and min_p, in this order."""

    temperature: float
    """0, the default: always the most likely token. Otherwise logits are divided by it; at most 100."""
    default_temperature: float
    """The temperature where neither this request nor the model's files say one; 0 by default."""
    top_k: int
    """Keep the k most likely tokens; 0, the default: all."""
    top_p: float
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1, the default: all."""
    min_p: float
    """Drop tokens whose probability is less than min_p times that of the most likely one; 0, the default: none."""
    repetition_penalty: float
    """Logits of tokens that occur in prompt or answer are divided by it if positive, else multiplied; 1, the default: none. In
    (0, 10]."""
    presence_penalty: float
    """Subtracted from the logits of tokens that occur in the answer; 0, the default: none. In [-2, 2]."""
    frequency_penalty: float
    """Subtracted from a token's logit as often as it occurs in the answer; 0, the default: none. In [-2, 2]."""
    logit_bias: Mapping[int, float]
    """Token id → what is added to its logit, in [-100, 100]; at most 1,024 ids."""
    no_repeat_ngram_size: int
    """No run of that many tokens occurs twice in prompt and answer together; 0, the default: any may."""
    encoder_no_repeat_ngram_size: int
    """No run of that many tokens of the prompt occurs in the answer; 0, the default: any may."""
    suppress_tokens: Sequence[int]
    """Ids that are never drawn; none by default. At most 4,096, begin_suppress_tokens, bad_words_ids and forced_eos_token_id
    included."""
    begin_suppress_tokens: Sequence[int]
    """Ids that are not drawn as the first token of an answer; none by default."""
    bad_words_ids: Sequence[Sequence[int]]
    """Runs of ids that the answer does not complete; none by default."""
    forced_eos_token_id: int | Sequence[int]
    """The last token of an answer that its length ends, or ids of which it is one; none by default."""
    seed: int | None
    """0 … 2**64 − 1; the same seed gives the same text. None: a random one."""
    n: int
    """Answers to one prompt, which is computed once; 1, the default, to 128. Answer k draws with seed + k: it is the answer to a
    request of its own with that seed. Chunks have the `index` of their answer. With num_beams the n best texts."""
    num_beams: int
    """Beam search, as in transformers: so many texts are followed side by side, and the best ones come when all have ended. 1, the
    default: none; at most 64. Not with a temperature above 0, which is none by default."""
    length_penalty: float
    """With num_beams: a text's score is the sum of its log-probabilities divided by its length to this power, in [-6, 6]. 1, the
    default; above 0 favours long texts."""
    early_stopping: bool | Literal["never"]
    """With num_beams, when a search ends that has found as many texts as beams: False, the default: when no beam, at its present
    length, is better than the worst of them; True: at once; "never": when no beam can become better."""
    max_tokens: int | None
    """Tokens to generate at most. None: as many as the model's longest sequence leaves, unless its files state a number."""
    min_tokens: int
    """Before that many tokens no id that ends the text is drawn, and stop strings do not count; 0, the default: from the first."""
    stop: str | Sequence[str]
    """Strings that end the text; not part of it. At most 16, each at most 256 bytes. None, or an empty list: the default."""
    stop_token_ids: Sequence[int]
    """Ids that end the text, in addition to the model's own; at most 256."""
    ignore_eos: bool
    """Continue after the model's end-of-text ids."""
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
    """Smaller is served earlier and preempted later, on workers with --scheduling-policy priority; 0, the default: neutral."""
    tenant: str
    """On whose behalf; a worker shares its steps fairly between tenants of one priority. To share no blocks either, set
    tenant_salt."""
    boundaries: Sequence[int]
    """Lengths of the prompt, in tokens, from where other prompts will go on, at most 8: models with a sliding window or recurrent
    layers keep what those need there. A chat has one at the end of its system prompt without being asked."""
    explain: bool
    """Ask the manager, before the request is sent to a worker, why the cache cannot serve more of the prompt; the answer is the
    stream's `explanation`. It costs one call, and the request does not fail if there is no answer. False, the default: not."""
