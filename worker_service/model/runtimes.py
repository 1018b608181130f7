"""The weights of a model in the runtime that computes its steps: native, torch, or the faster of the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..attention.interface import ATTENTION_NAME, register
from .checkpoint import listed, load_whole, stored_spelling
from .errors import ModelError, NotNative
from .forward.contract import Runtime
from .forward.encoder_decoder import EncoderDecoderRuntime
from .forward.layers import AttentionLayer
from .forward.mixer import describe_mixers
from .forward.modules import ModulesRuntime
from .forward.native import NativeRuntime
from .forward.packed_linear import pack_linears
from .guard.encoder_decoder import guarded_encoder_decoder
from .guard.support import guarded_layers
from .language_model import attention_of, class_to_load
from .native.comparison import Comparison
from .native.load import NotNativeAfterAll, try_native
from .native.timing import Measure, TimedWorkload
from .progress import Progress
from .settings import ModelSettings
from .source.files import check_weights

NO_ENCODERS = "it computes no encoder-decoder models"
"""Why the native step does not compute a model with an encoder."""


class Loaded(NamedTuple):
    """A runtime, and the attention layers of its model."""

    runtime: Runtime
    layers: Sequence[AttentionLayer]


class Lengths(NamedTuple):
    """The longest texts of a model."""

    max_model_len: int
    max_encoder_tokens: int | None
    """Tokens of its encoder's longest input; None: it has no encoder."""


@dataclass(frozen=True, slots=True)
class RuntimeLoader:
    """Loads one model, once or several times, one in memory at a time. Every method raises ModelError."""

    path: Path
    config: Any
    device: torch.device
    dtype: torch.dtype
    lengths: Lengths
    settings: ModelSettings
    cache_dir: Path
    progress: Progress

    def load(self, fingerprint: str, measure: Measure) -> Loaded:
        """Load the model as the settings say. For `auto` this includes the choice between runtimes, which a first start may have to
        measure."""
        if self.lengths.max_encoder_tokens is not None:
            return self._load_encoder_decoder(self.lengths.max_encoder_tokens)
        if self.settings.runtime == "torch":
            return self._load_torch()
        if self.settings.runtime == "native" or self.settings.quantize != "none":
            return self._load_native(None)
        comparison = Comparison(
            fingerprint,
            self.dtype,
            self.settings.block_size,
            TimedWorkload.within(
                self.lengths.max_model_len, self.settings.max_num_batched_tokens, self.settings.max_num_seqs
            ),
            self.cache_dir,
            self.progress,
            measure,
        )
        return self._load_faster(comparison)

    def _load_encoder_decoder(self, max_encoder_tokens: int) -> Loaded:
        if self.device.type == "cpu":
            self.progress(f"runtime: torch; not native: {NO_ENCODERS}")
        model = _load_weights(self.path, self.config, self.dtype, self.device, self.progress)
        if self.device.type == "cpu":
            pack_linears(model)
        seq2seq, layers = guarded_encoder_decoder(
            model, self.config, self.dtype, self.device, self.lengths.max_model_len, max_encoder_tokens
        )
        return Loaded(EncoderDecoderRuntime(seq2seq, layers, self.device), layers)

    def _load_faster(self, comparison: Comparison) -> Loaded:
        """Load the faster runtime: where torch may be faster, both are loaded and timed, once. Torch has its weights in oneDNN's
        layout, as it serves them; they cannot be packed for the native step from there, so the weights are read again."""
        native = self._load_native(comparison)
        library = native.runtime.packed.library if isinstance(native.runtime, NativeRuntime) else None
        if library is None or not comparison.is_open(library):
            return native
        self.progress(f"runtime: {comparison.question()}; both load the weights now and are timed")
        native_figures = comparison.time("native", *native)
        if native_figures is None:
            return native
        del native  # one model in memory at a time
        other = self._try_torch()
        torch_figures = None if other is None else comparison.time("torch", *other)
        if other is not None and torch_figures is not None:
            choice = comparison.choose(library, native_figures, torch_figures)
            if choice.runtime == "torch":
                return other
        del other
        return self._load_native(None)

    def _load_native(self, comparison: Comparison | None) -> Loaded:
        """Load natively, or with torch if the model is not native and the settings allow it, or if an earlier start chose it."""
        model, settings = _load_weights(self.path, self.config, self.dtype, self.device, self.progress), self.settings
        try:
            runtime, layers = try_native(
                model,
                self.config,
                self.dtype,
                self.device,
                self.lengths.max_model_len,
                settings.block_size,
                self.progress,
                settings.quantize == "int8",
                None if comparison is None else comparison.follow_kept,
            )
            return Loaded(runtime, layers)
        except NotNative as error:
            if settings.quantize != "none" or settings.runtime == "native":
                raise not_native(settings, str(error)) from error
            if self.device.type == "cpu":
                self.progress(f"runtime: torch; not native: {error}")
            is_empty = isinstance(error, NotNativeAfterAll)
        # After the handler: the error's traceback holds the packed weights. One model in memory at a time.
        if is_empty:
            del model
            return self._load_torch()
        return self._with_torch(model)

    def _load_torch(self) -> Loaded:
        return self._with_torch(_load_weights(self.path, self.config, self.dtype, self.device, self.progress))

    def _try_torch(self) -> Loaded | None:
        try:
            return self._load_torch()
        except ModelError as error:
            self.progress(f"runtime: native; torch cannot serve this model: {error}")
            return None

    def _with_torch(self, model: Any) -> Loaded:
        if self.device.type == "cpu":
            pack_linears(model)
        layers, mixers = guarded_layers(model, self.config, self.dtype, self.device, self.lengths.max_model_len)
        if mixers:
            self.progress(describe_mixers(mixers))
        return Loaded(ModulesRuntime(model, layers, self.device, mixers), layers)


def not_native(settings: ModelSettings, reason: str) -> ModelError:
    """The error of a model that the native step does not compute, where the settings ask for it."""
    if settings.quantize != "none":
        return ModelError(
            f"--quantize {settings.quantize} needs the native step, which cannot serve this model here: {reason}. "
            "Leave --quantize out."
        )
    return ModelError(f"--runtime native cannot serve this model here: {reason}. Give --runtime auto or torch.")


def _load_weights(
    path: Path, config: Any, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> Any:
    """The model with all of its weights. progress gets a line about tensors that it does not use. Raises ModelError."""
    register()
    model, unused = load_whole(
        class_to_load(config),
        path,
        check_weights(path).keys(),
        stored_spelling,
        config=config,
        dtype=dtype,
        attn_implementation=attention_of(config, ATTENTION_NAME),
        use_safetensors=True,
        # Tensors are copied from the mapped file to the device one by one: host memory never holds a GPU's weights.
        device_map={"": device},
    )
    if unused and progress is not None:
        progress(f"the model uses all of its files but {listed(unused)}")
    model.eval()
    return model
