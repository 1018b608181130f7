"""What a model's generation_config.json asks of texts, field by field: a default of requests, nothing here, or more than there is.

Without that file `generate` reads the same fields from config.json, and so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers import GenerationConfig

from kvpool.protocol.limits import BadField, check_options
from kvpool.protocol.sampling import SAMPLING_OPTIONS
from kvpool.v1 import worker_pb2

from .errors import ModelError, library_errors
from .source.files import CONFIG, GENERATION_CONFIG, read_object


class Use(Enum):
    """What becomes of a field."""

    DEFAULT = "default"
    """A default of requests, which each may override."""
    IDS = "ids"
    """Says how texts begin or end."""
    WHILE_SAMPLING = "while sampling"
    """Nothing while the file does not ask to sample; refused if it does."""
    NOTHING = "nothing"
    """No text of this worker depends on it, or requests say it themselves."""
    REFUSED = "refused"
    """Texts depend on it, and it is not carried out."""


class Field(NamedTuple):
    """One field of transformers' GenerationConfig."""

    use: Use
    why: str
    """The option of requests that overrides it, why it has no effect, or what it would need."""


_ONE_BY_ONE = "tokens are computed one by one here, and a draft changes no text"
_HOW = "how generate computes or returns"
_OWN_CACHE = "the KV cache is the worker's own"
_OPTION = "the option of that name"
_SAMPLERS = "another choice of tokens than top_k and top_p"
_SAMPLING: Final = [name for name, option in SAMPLING_OPTIONS.items() if option.is_of_files and name != "temperature"]
"""Fields that have an option's name and meaning. A temperature counts only where the file asks to sample."""

FIELDS: Final[Mapping[str, Field]] = {
    "do_sample": Field(Use.DEFAULT, "temperature: without do_sample it is 0, whatever the file's temperature"),
    "temperature": Field(Use.DEFAULT, "temperature; 1 where the file asks to sample and has none"),
    **dict.fromkeys(_SAMPLING, Field(Use.DEFAULT, _OPTION)),
    "top_k": Field(Use.DEFAULT, "top_k; generate's own 50, where no file says so, is none"),
    "max_new_tokens": Field(Use.DEFAULT, "max_tokens"),
    "max_length": Field(Use.DEFAULT, "max_tokens; it counts the prompt, and is nothing for longer prompts"),
    "min_new_tokens": Field(Use.DEFAULT, "min_tokens"),
    "min_length": Field(Use.DEFAULT, "min_tokens; it counts the prompt"),
    "stop_strings": Field(Use.DEFAULT, "stop"),
    "num_beams": Field(Use.DEFAULT, "num_beams, a temperature above 0, or n above it"),
    **dict.fromkeys(("length_penalty", "early_stopping"), Field(Use.DEFAULT, _OPTION)),
    "eos_token_id": Field(Use.IDS, "ends texts; a request adds stop_token_ids, or sets ignore_eos"),
    "decoder_start_token_id": Field(Use.IDS, "begins the texts of encoder-decoder models"),
    "bos_token_id": Field(Use.IDS, "begins the texts of encoder-decoder models without a decoder_start_token_id"),
    "forced_bos_token_id": Field(
        Use.IDS,
        "the second token of encoder-decoder models' texts; of others, where only prompts of one token have it, nothing",
    ),
    "pad_token_id": Field(Use.NOTHING, "nothing is padded"),
    **dict.fromkeys(
        ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
        Field(Use.WHILE_SAMPLING, _SAMPLERS),
    ),
    "encoder_repetition_penalty": Field(Use.REFUSED, "a penalty for what the prompt lacks"),
    "exponential_decay_length_penalty": Field(Use.REFUSED, "a score of the end that grows with the text"),
    "sequence_bias": Field(Use.REFUSED, "scores of runs of tokens: logit_bias is for single ones"),
    "guidance_scale": Field(Use.REFUSED, "a second text without the prompt next to each"),
    "watermarking_config": Field(Use.REFUSED, "marks in the choice of tokens"),
    "token_healing": Field(Use.REFUSED, "another end of the prompt"),
    "penalty_alpha": Field(Use.REFUSED, "contrastive search"),
    "dola_layers": Field(Use.REFUSED, "logits of inner layers"),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty"), Field(Use.REFUSED, "groups of beams")),
    **dict.fromkeys(("constraints", "force_words_ids"), Field(Use.REFUSED, "constrained beam search")),
    "renormalize_logits": Field(Use.NOTHING, "it changes no order of tokens; a file with num_beams too is refused"),
    "remove_invalid_values": Field(Use.NOTHING, "a text whose logits are not finite ends with an error"),
    "max_time": Field(Use.NOTHING, "requests have a timeout"),
    "num_return_sequences": Field(Use.NOTHING, "requests have n"),
    **dict.fromkeys(
        (
            *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
            *("assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens"),
            *("max_matching_ngram_size", "speculation_type"),
        ),
        Field(Use.NOTHING, _ONE_BY_ONE),
    ),
    **dict.fromkeys(
        ("use_cache", "cache_implementation", "cache_config", "max_cache_len"),
        Field(Use.NOTHING, _OWN_CACHE),
    ),
    **dict.fromkeys(
        (
            *("prefill_chunk_size", "low_memory", "compile_config", "disable_compile"),
            *("continuous_batching_config", "output_attentions", "output_hidden_states", "output_scores"),
            *("output_logits", "return_dict_in_generate"),
        ),
        Field(Use.NOTHING, _HOW),
    ),
    **dict.fromkeys(("transformers_version", "_from_model_config"), Field(Use.NOTHING, "who wrote the file")),
}
"""Every field of GenerationConfig in transformers 5.23; what is no field there `generate` ignores too."""

_NEUTRAL: Final[Mapping[str, Any]] = GenerationConfig._get_default_generation_params() | {
    "guidance_scale": 1,
    "penalty_alpha": 0,
}
"""Values that ask for nothing, other than none, false and empty ones."""


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read the file, or its fields in config.json if there is no such file. Raises ModelError."""
    with library_errors(f"transformers cannot read {folder / _source(folder)}", "Correct the file, or fetch it again."):
        if _source(folder) == GENERATION_CONFIG:
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
        return GenerationConfig.from_pretrained(
            folder, config_file_name=CONFIG, local_files_only=True, _from_model_config=True
        )


def _source(folder: Path) -> str:
    return GENERATION_CONFIG if (folder / GENERATION_CONFIG).is_file() else CONFIG


def read_generation(
    config: GenerationConfig,
    folder: Path,
    *,
    vocab_size: int,
    end_of_turn: Mapping[str, int],
    num_forced: int = 0,
    has_tokenizer: bool = True,
) -> tuple[worker_pb2.ModelFacts, list[str]]:
    """Check the fields and make them facts (ids that end a text, ids that also end one in chats, both ascending, and defaults of
    requests) and lines for the log. `end_of_turn`: names and ids of tokens that end a turn of a chat; `num_forced`: tokens that
    generate counts as new ones, and that are no part of an answer. Raises ModelError, naming the field."""
    source = _source(folder)
    fields = {name: value for name, value in vars(config).items() if name in FIELDS and _says(name, value)}
    _refuse(fields, source)
    if "stop_strings" in fields and not has_tokenizer:
        raise _wrong(source, "stop_strings", "this model has no tokenizer, so there is no text to find them in")
    lines: list[str] = []
    eos, where = _eos(config, folder, source)
    eos_token_ids = sorted(set(_in_vocabulary(eos, "eos_token_id", where, vocab_size, lines)))
    more = {name: token_id for name, token_id in end_of_turn.items() if token_id not in eos_token_ids}
    ends = ", ".join(map(str, eos_token_ids)) or "none"
    lines.append(f"ids that end a text: {ends} ({where})")
    if more:
        shown = ", ".join(f"{token_id} ({name})" for name, token_id in more.items())
        lines.append(f"in chats these ids end it too: {shown}, the tokenizer's")
    defaults = _defaults(config, source, num_forced, vocab_size, lines)
    overridable = [name for name in fields if FIELDS[name].use is Use.DEFAULT]
    if "temperature" in overridable and config.do_sample is not True:
        overridable.remove("temperature")
    if overridable:
        values = ", ".join(f"{name} {_short(fields[name])}" for name in overridable)
        lines.append(f"{source}: defaults of requests: {values}")
    ignored = [name for name in fields if FIELDS[name].use in (Use.NOTHING, Use.WHILE_SAMPLING)]
    if not num_forced and "forced_bos_token_id" in fields:
        ignored.append("forced_bos_token_id")
    ignored = [name for name in ignored if name not in ("pad_token_id", "transformers_version", "_from_model_config")]
    if ignored:
        reasons = ", ".join(f"{name} ({FIELDS[name].why})" for name in ignored)
        lines.append(f"{source}: without effect here: {reasons}")
    unknown = sorted(name for name in vars(config) if name not in FIELDS and not name.startswith("_"))
    if unknown:
        lines.append(f"{source}: unknown, and without effect: {', '.join(unknown)}")
    facts = worker_pb2.ModelFacts(
        eos_token_ids=eos_token_ids, end_of_turn_token_ids=sorted(set(more.values())), defaults=defaults
    )
    return facts, lines


def _says(name: str, value: Any) -> bool:
    """Whether the value asks for something that generate would not do without the field."""
    if name in ("temperature", "top_k", "do_sample", "num_beams", "min_new_tokens"):
        return value is not None
    return value is not None and value is not False and value not in (0, [], {}) and value != _NEUTRAL.get(name)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _wrong(source: str, name: str, what: str) -> ModelError:
    return ModelError(f"{source}: {name}: {what}. Mend the field, or take it out of the file.")


def _refuse(fields: Mapping[str, Any], source: str) -> None:
    """Raises ModelError for a field that texts depend on and that is not carried out."""
    is_sampled = fields.get("do_sample") is True
    has_beams = _is_number(fields.get("num_beams")) and fields["num_beams"] > 1
    for name, value in fields.items():
        use, why = FIELDS[name]
        if use is Use.REFUSED or (use is Use.WHILE_SAMPLING and is_sampled):
            what = f"{name} {_short(value)} needs what this worker does not have ({why})"
        elif name == "num_beams" and has_beams and is_sampled:
            what = "num_beams with do_sample asks for beams that are drawn, and beams are not drawn here"
        elif name == "renormalize_logits" and has_beams:
            what = "renormalize_logits with num_beams needs scores that are normalised again, which this worker does not do"
        else:
            continue
        raise ModelError(
            f"{source}: {what}. Texts would be others than generate's: take the field out of the file to have them without it."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _eos(config: GenerationConfig, folder: Path, source: str) -> tuple[list[Any], str]:
    """The ids of the file, or else those that config.json states, and the name of that file. A default of the config's class does
    not count."""
    ids = config.eos_token_id
    if ids is None:
        source, content = CONFIG, read_object(folder / CONFIG)
        inner = [content.get(name) for name in ("text_config", "decoder", "generator")]
        parts = [content, *(part for part in inner if isinstance(part, dict))]
        ids = next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)
    if ids is None:
        return [], "no file states any"
    return (ids if isinstance(ids, list) else [ids]), source


def _in_vocabulary(ids: Iterable[Any], name: str, source: str, vocab_size: int, lines: list[str]) -> list[int]:
    """The ids that are in the vocabulary, in order; a line is added for the others. Raises ModelError for what is no id."""
    inside: list[int] = []
    outside: list[int] = []
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise _wrong(source, name, f"needed token ids, got {_short(token_id)!r}")
        if 0 <= token_id < vocab_size:
            inside.append(token_id)
        else:
            outside.append(token_id)
    if outside:
        lines.append(
            f"{source}: {name}: {', '.join(map(str, outside))} is outside the vocabulary of {vocab_size} tokens: ignored"
        )
    return inside


_STOP: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_EARLY_STOPPING: Final = {
    False: worker_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: worker_pb2.EARLY_STOPPING_FULL,
    "never": worker_pb2.EARLY_STOPPING_NEVER,
}


def _defaults(
    config: GenerationConfig, source: str, num_forced: int, vocab_size: int, lines: list[str]
) -> worker_pb2.GenerationDefaults:
    """Take over the fields that are defaults of requests. Raises ModelError for a value that no request may have."""
    defaults = worker_pb2.GenerationDefaults()
    sampling = defaults.sampling
    values = {name: value for name in FIELDS if (value := getattr(config, name, None)) is not None}
    if "do_sample" in values:
        sampling.temperature = 0
    name = "temperature"
    try:
        if values.get("do_sample") is True:
            sampling.temperature = values.get("temperature", 1.0)
        for name in _SAMPLING:
            if name not in values:
                continue
            value = values[name]
            if name == "bad_words_ids":
                words = [_in_vocabulary(word, name, source, vocab_size, lines) for word in value]
                complete = [word for word, given in zip(words, value, strict=True) if word and len(word) == len(given)]
                sampling.bad_words_ids.lists.extend(worker_pb2.TokenIds(ids=word) for word in complete)
            elif name.endswith(("_tokens", "_id")):
                getattr(sampling, name).ids.extend(
                    _in_vocabulary([value] if isinstance(value, int) else value, name, source, vocab_size, lines)
                )
            else:
                setattr(sampling, name, value)
        for name, field in _STOP.items():
            if name in values:
                setattr(defaults.stop, field, values[name])  # refuses what is no number of tokens
                setattr(defaults.stop, field, max(1 if field == "max_tokens" else 0, values[name] - num_forced))
        name = "stop_strings"
        if strings := values.get(name):
            defaults.stop.stop_strings.extend([strings] if isinstance(strings, str) else strings)
        for name in ("max_length", "min_length"):
            setattr(defaults, name, values.get(name, 0))
        name = "num_beams"
        if values.get(name, 1) > 1:
            defaults.beam_search.num_beams = values[name]
        name = "length_penalty"
        if name in values:
            defaults.beam_search.length_penalty = values[name]
        name = "early_stopping"
        if name in values:
            defaults.beam_search.early_stopping = _EARLY_STOPPING[values[name]]
    except (TypeError, ValueError, KeyError):
        raise _wrong(source, name, f"no request may have {_short(getattr(config, name))!r}") from None
    _check(defaults, source)
    return defaults


def _check(defaults: worker_pb2.GenerationDefaults, source: str) -> None:
    """Check the defaults as a request that asks for them is checked. Raises ModelError."""
    search = worker_pb2.BeamSearch()
    search.CopyFrom(defaults.beam_search)
    search.num_beams = max(2, search.num_beams)
    for asked in (
        worker_pb2.GenerateRequest(sampling=defaults.sampling, stop=defaults.stop),
        worker_pb2.GenerateRequest(beam_search=search),
    ):
        try:
            check_options(asked)
        except BadField as error:
            name = error.field.rpartition(".")[2]
            raise _wrong(source, name, f"needed {error.needed}, got {error.got}") from None
