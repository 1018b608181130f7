"""A model's facts and memory needs from its config, without loading it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import library_errors
from .facts import TokenizerFiles
from .load import prepare, read_ends_and_defaults
from .memory.facts import cross_needs, facts_of_meta_model, group_needs
from .memory.meta_model import MetaModel, build_meta_model
from .memory.plan import MemoryBudget, plan_memory
from .native.comparison import expected_runtime
from .placement import DTYPES, Prepared, choose_dtype, read_config
from .settings import MemorySettings, ModelSettings
from .source.convert import dtype_that_keeps
from .source.resolve import ModelSource


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """Facts of a model without its weights."""

    name: str
    architecture: str
    """`model_type` of the config, e.g. llama."""
    prepared: Prepared
    """What a start would decide; the dtype is the one that it would load the model in."""
    meta_model: MetaModel
    runtime: str
    """The runtime that a start is expected to choose, in words."""
    is_quantized: bool = False
    """Whether its weights would be packed as int8."""

    def weight_bytes(self) -> dict[str, int]:
        """Size of the weights in each dtype, by its name."""
        device = self.prepared.device
        return {name: self.meta_model.weight_bytes(dtype, device) for name, dtype in DTYPES.items()}

    def plan(self, settings: MemorySettings) -> MemoryBudget:
        """Plan the memory as LoadedModel.plan does, with estimated activations. Raises ModelError."""
        dtype, layers = self.prepared.dtype, self.meta_model.layers
        facts = facts_of_meta_model(self.meta_model, dtype, self.prepared.device, settings, self.is_quantized)
        cross = cross_needs(layers, dtype, self.prepared.max_encoder_tokens)
        return plan_memory(facts, settings, group_needs(layers, dtype), cross)


def outline_model(source: ModelSource, settings: ModelSettings) -> Outline:
    """Check the config as load_model does. Reads no weights, converts nothing; some seconds.

    Raises ModelError.
    """
    with library_errors(f"the needs of {source.name} cannot be found"):
        config = read_config(source.path, source.gguf)
        prepared = prepare(config, settings)
        if source.gguf is None:
            read_ends_and_defaults(TokenizerFiles(source.path), config, prepared.max_encoder_tokens)
        if source.gguf is not None and prepared.device.type == "cuda":
            # For a GGUF file it follows from the tensors, and a conversion would write it to config.json.
            own = dtype_that_keeps(source.path / source.gguf)
            prepared = replace(prepared, dtype=choose_dtype(settings.dtype, prepared.device, own))
        meta_model = build_meta_model(config, prepared.max_encoder_tokens)
        runtime = expected_runtime(settings, prepared, is_recurrent=bool(meta_model.mixers))
        is_quantized = settings.quantize != "none"
        return Outline(source.name, config.model_type, prepared, meta_model, runtime, is_quantized)
