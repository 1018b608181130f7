"""Loads a model by its settings, ready to run: the entry of the model side."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Self

import structlog

from kvpool.v1 import worker_pb2

from ..attention.layer import AttentionBackend, AttentionSpec
from ..attention.packing import StepSizes
from ..attention.selection import BackendName, UnsuitableBackend, choose_backend, make_torch
from ..engine.prompt import EncoderSettings
from .device import choose_device
from .errors import ModelError, library_errors
from .facts import TokenizerFiles, read_encoder_settings
from .forward.contract import Runtime
from .forward.kv_cache import KVCache
from .forward.kv_plan import KVCachePlan
from .forward.native import NativeRuntime
from .forward.runner import ModelRunner
from .generation import read_generation, read_generation_config
from .guard.batch_invariance import find_batch_invariance
from .guard.support import check_config, check_replica
from .length import (
    choose_max_encoder_tokens,
    choose_max_model_len,
    describe_regime,
    encoder_config,
    fix_longrope,
    is_encoder_decoder,
)
from .memory.facts import cross_needs, facts_of_loaded, group_needs
from .memory.plan import MemoryBudget, plan_memory
from .native.load import NATIVE_DTYPES
from .native.timing import Measure, measure_runtime
from .placement import Prepared, choose_dtype, dtype_name, own_dtype, read_config
from .progress import Progress
from .runtimes import NO_ENCODERS, RuntimeLoader, not_native
from .settings import MemorySettings, ModelSettings
from .source.cache_dir import open_cache_dir
from .source.files import TOKENIZER, check_small_files, check_weights
from .source.fingerprint import fingerprint
from .source.resolve import resolve_model


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that passed the guard, for one runner. The facts do not refer to the weights."""

    facts: worker_pb2.ModelFacts
    """What GetModel answers, without what the worker's settings and its files make of it."""
    files: dict[worker_pb2.ModelFile, bytes]
    """The content of the files that clients are given."""
    encoder: EncoderSettings | None
    """None: the prompt is the beginning of the text."""
    runtime: Runtime

    def attention_backend(
        self, name: BackendName, block_size: int, progress: Progress | None = None
    ) -> AttentionBackend | None:
        """The backend of that name, or the best that passes its self-test here; progress gets a line. None: the runtime attends
        itself. Raises ModelError."""
        if isinstance(self.runtime, NativeRuntime):
            return None
        runtime = self.runtime
        if not runtime.layers:  # nothing attends: there is nothing to test a backend with, and none is called
            return make_torch(runtime.dtype, runtime.device, ())
        setting = AttentionSpec(runtime.attention_needs, runtime.dtype, runtime.device, block_size)
        try:
            return choose_backend(name, setting, progress or structlog.get_logger("kvpool.model").info)
        except UnsuitableBackend as error:
            raise ModelError(str(error)) from error

    def try_batch_invariance(self, backend: AttentionBackend | None) -> Self:
        """The same model, with the test's result in its facts. Takes some forward passes; call it before `runner`."""
        batch_invariance = find_batch_invariance(self.runtime, self.facts.max_model_len, backend)
        facts = worker_pb2.ModelFacts()
        facts.CopyFrom(self.facts)
        facts.batch_invariance.CopyFrom(batch_invariance)
        return replace(self, facts=facts)

    def plan(self, settings: MemorySettings, backend: AttentionBackend | None = None) -> MemoryBudget:
        """Size of the KV cache and use of the memory; keeps nothing allocated. backend: see runner. Raises ModelError."""
        limit = None if self.encoder is None else self.encoder.max_tokens
        facts = facts_of_loaded(
            self.runtime, self.facts.max_model_len, settings, lambda plan: self.runner(plan, backend), limit
        )
        cross = cross_needs(self.runtime.layers, self.runtime.dtype, limit)
        return plan_memory(facts, settings, group_needs(self.runtime.layers, self.runtime.dtype), cross)

    def runner(
        self, plan: KVCachePlan, backend: AttentionBackend | None = None, sizes: StepSizes | None = None
    ) -> ModelRunner:
        """Allocate the KV cache and bind the model to it. backend: None: plain torch, unless the runtime attends itself. sizes: see
        ModelRunner."""
        runtime = self.runtime
        cache = KVCache(plan, runtime.layers, runtime.dtype, runtime.device, runtime.mixers)
        if not isinstance(runtime, NativeRuntime):
            backend = backend or make_torch(runtime.dtype, runtime.device, runtime.attention_needs)
        return ModelRunner(runtime, cache, backend, sizes=sizes)


def load_model(
    settings: ModelSettings, progress: Progress | None = None, measure: Measure = measure_runtime
) -> LoadedModel:
    """Find, convert if necessary, check and load the model. Blocking; seconds, or half a minute for a conversion.

    progress gets one line per step (default: the log). measure: times a runtime, where `auto` has to find out which is faster.
    Raises ModelError.
    """
    with library_errors(f"{settings.model} cannot be loaded"):
        progress = progress or structlog.get_logger("kvpool.model").info
        cache_dir = open_cache_dir(settings.cache_dir)
        folder = resolve_model(settings.model, cache_dir, progress)
        check_small_files(folder.path)
        config = read_config(folder.path)
        prepared = prepare(config, settings)
        check_weights(folder.path)
        if (line := describe_regime(config, prepared.rope_regime)) is not None:
            progress(line)
        tokenizer_files = TokenizerFiles(folder.path)
        facts, encoder, lines = read_ends_and_defaults(tokenizer_files, config, prepared.max_encoder_tokens)
        for line in lines:
            progress(line)
        dtype = dtype_name(prepared.dtype)
        facts.model_name = folder.name
        facts.model_fingerprint = fingerprint(
            folder.path, dtype, cache_dir, progress, prepared.rope_regime, settings.quantize
        )
        facts.architecture = config.model_type
        facts.dtype = dtype
        facts.device = str(prepared.device)
        facts.vocab_size = config.get_text_config(decoder=True).vocab_size
        facts.max_model_len = prepared.max_model_len
        files = tokenizer_files.served()
        if worker_pb2.MODEL_FILE_TOKENIZER not in files:
            progress(f"{folder.path} has no {TOKENIZER}: prompts and answers are token ids")
        started = time.monotonic()
        loader = RuntimeLoader(folder.path, config, prepared, settings, cache_dir, progress)
        runtime = loader.load(facts.model_fingerprint, measure)
        progress(f"loaded {facts.model_name} ({facts.dtype} on {facts.device}) in {time.monotonic() - started:.1f} s")
        return LoadedModel(facts, files, encoder, runtime)


def prepare(config: Any, settings: ModelSettings) -> Prepared:
    """Choose device, dtype and the longest sequence, fix longrope in the config in place, and check the config.

    Raises ModelError.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device, own_dtype(config))
    if settings.quantize != "none" and (device.type != "cpu" or dtype not in NATIVE_DTYPES):
        raise ModelError(
            f"--quantize {settings.quantize} needs the native step, which computes float32 and bfloat16 on a CPU; this worker "
            f"would compute {dtype_name(dtype)} on {device}. Leave --quantize out, or give --device cpu and another --dtype."
        )
    max_model_len = choose_max_model_len(config, settings.max_model_len)
    rope_regime = fix_longrope(config, max_model_len)
    max_encoder_tokens = None
    if is_encoder_decoder(config):
        max_encoder_tokens = choose_max_encoder_tokens(config, max_model_len, settings.max_encoder_tokens)
    elif settings.max_encoder_tokens is not None:
        raise ModelError("This model has no encoder: leave out --max-encoder-tokens.")
    if max_encoder_tokens is not None and (settings.runtime == "native" or settings.quantize != "none"):
        raise not_native(settings, NO_ENCODERS)
    check_config(config, max_model_len)
    check_replica(config, max_model_len, max_encoder_tokens)
    return Prepared(device, dtype, max_model_len, rope_regime, max_encoder_tokens)


def read_ends_and_defaults(
    files: TokenizerFiles, config: Any, max_encoder_tokens: int | None
) -> tuple[worker_pb2.ModelFacts, EncoderSettings | None, list[str]]:
    """Read how texts begin and end, and what requests mean by default; the lines are for the log. Raises ModelError."""
    generation_config = read_generation_config(files.folder)
    encoder = None
    if max_encoder_tokens is not None:
        vocab_size = encoder_config(config).vocab_size
        encoder = read_encoder_settings(generation_config, config, max_encoder_tokens, vocab_size)
    facts, lines = read_generation(
        generation_config,
        files.folder,
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        end_of_turn=files.end_of_turn(),
        num_forced=0 if encoder is None else len(encoder.decoder_prompt) - 1,
        has_tokenizer=files.tokenizer_json() is not None,
    )
    if encoder is not None:
        facts.is_encoder_decoder = True
        facts.max_encoder_tokens = encoder.max_tokens
        facts.decoder_start_token_id = encoder.decoder_prompt[0]
        if len(encoder.decoder_prompt) > 1:
            facts.forced_bos_token_id = encoder.decoder_prompt[1]
    return facts, encoder, lines
