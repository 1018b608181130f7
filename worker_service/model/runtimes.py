"""The weights of a model in the runtime that computes its steps: native, torch, or the faster of the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attention.interface import ATTENTION_NAME, register
from .checkpoint import listed, load_whole, stored_spelling
from .errors import ModelError, NotNative
from .forward.contract import Runtime
from .forward.mixer import describe_mixers
from .forward.native import NativeRuntime
from .forward.packed_linear import pack_linears
from .guard.support import guarded
from .language_model import attention_of, class_to_load
from .native.comparison import Comparison
from .native.load import NotNativeAfterAll, try_native
from .native.timing import Measure, TimedWorkload
from .placement import Prepared
from .progress import Progress
from .settings import ModelSettings
from .source.files import check_weights

NO_ENCODERS = "it computes no encoder-decoder models"
"""Why the native step does not compute a model with an encoder."""


@dataclass(frozen=True, slots=True)
class RuntimeLoader:
    """Loads one model, once or several times, one in memory at a time. Every method raises ModelError."""

    path: Path
    config: Any
    prepared: Prepared
    settings: ModelSettings
    cache_dir: Path
    progress: Progress

    def load(self, fingerprint: str, measure: Measure) -> Runtime:
        """Load the model as the settings say. For `auto` this includes the choice between runtimes, which a first start may have to
        measure."""
        prepared, settings = self.prepared, self.settings
        if prepared.max_encoder_tokens is not None and prepared.device.type == "cpu":
            self.progress(f"runtime: torch; not native: {NO_ENCODERS}")
        if prepared.max_encoder_tokens is not None or settings.runtime == "torch":
            return self._with_torch(self._load_weights())
        if settings.runtime == "native" or settings.quantize != "none":
            return self._load_native(None)
        workload = TimedWorkload.within(prepared.max_model_len, settings.max_num_batched_tokens, settings.max_num_seqs)
        return self._load_faster(
            Comparison(
                fingerprint, prepared.dtype, settings.block_size, workload, self.cache_dir, self.progress, measure
            )
        )

    def _load_faster(self, comparison: Comparison) -> Runtime:
        """Load the faster runtime: where torch may be faster, both are loaded and timed, once. Torch has its weights in oneDNN's
        layout, as it serves them; they cannot be packed for the native step from there, so the weights are read again."""
        native = self._load_native(comparison)
        library = native.packed.library if isinstance(native, NativeRuntime) else None
        if library is None or not comparison.is_open(library):
            return native
        self.progress(f"runtime: {comparison.question()}; both load the weights now and are timed")
        native_figures = comparison.time("native", native)
        if native_figures is None:
            return native
        del native  # one model in memory at a time
        other = self._try_torch()
        torch_figures = None if other is None else comparison.time("torch", other)
        if other is not None and torch_figures is not None:
            choice = comparison.choose(library, native_figures, torch_figures)
            if choice.runtime == "torch":
                return other
        del other
        return self._load_native(None)

    def _load_native(self, comparison: Comparison | None) -> Runtime:
        """Load natively, or with torch if the model is not native and the settings allow it, or if an earlier start chose it."""
        model, settings = self._load_weights(), self.settings
        follow_kept = None if comparison is None else comparison.follow_kept
        try:
            return try_native(model, self.config, self.prepared, settings, self.progress, follow_kept)
        except NotNative as error:
            if settings.quantize != "none" or settings.runtime == "native":
                raise not_native(settings, str(error)) from error
            if self.prepared.device.type == "cpu":
                self.progress(f"runtime: torch; not native: {error}")
            is_empty = isinstance(error, NotNativeAfterAll)
        # After the handler: the error's traceback holds the packed weights. One model in memory at a time.
        if is_empty:
            del model
            model = self._load_weights()
        return self._with_torch(model)

    def _try_torch(self) -> Runtime | None:
        try:
            return self._with_torch(self._load_weights())
        except ModelError as error:
            self.progress(f"runtime: native; torch cannot serve this model: {error}")
            return None

    def _with_torch(self, model: Any) -> Runtime:
        prepared = self.prepared
        if prepared.device.type == "cpu":
            pack_linears(model)
        device, lengths = prepared.device, (prepared.max_model_len, prepared.max_encoder_tokens)
        runtime = guarded(model, self.config, prepared.dtype, device, *lengths)
        if runtime.mixers:
            self.progress(describe_mixers(runtime.mixers))
        return runtime

    def _load_weights(self) -> Any:
        register()
        model, unused = load_whole(
            class_to_load(self.config),
            self.path,
            check_weights(self.path).keys(),
            stored_spelling,
            config=self.config,
            dtype=self.prepared.dtype,
            attn_implementation=attention_of(self.config, ATTENTION_NAME),
            use_safetensors=True,
            # Tensors are copied from the mapped file to the device one by one: host memory never holds a GPU's weights.
            device_map={"": self.prepared.device},
        )
        if unused:
            self.progress(f"the model uses all of its files but {listed(unused)}")
        model.eval()
        return model


def not_native(settings: ModelSettings, reason: str) -> ModelError:
    """The error of a model that the native step does not compute, where the settings ask for it."""
    if settings.quantize != "none":
        return ModelError(
            f"--quantize {settings.quantize} needs the native step, which cannot serve this model here: {reason}. "
            "Leave --quantize out."
        )
    return ModelError(f"--runtime native cannot serve this model here: {reason}. Give --runtime auto or torch.")
