"""A model's facts and memory needs from its config, without loading it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .candidate import CandidateModel
from .errors import library_errors
from .facts import TokenizerFiles
from .load import prepare, read_ends_and_defaults
from .memory.facts import cross_needs, facts_of_meta_model, group_needs
from .memory.meta_model import MetaModel, build_meta_model
from .memory.plan import MemoryBudget, MemorySettings, plan_memory
from .native.comparison import expected_runtime
from .placement import DTYPES, choose_dtype, read_config
from .settings import ModelSettings
from .source.convert import dtype_that_keeps
from .source.gguf_config import open_gguf
from .source.resolve import ConfigSource


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """Facts of a model without its weights."""

    name: str
    architecture: str
    """`model_type` of the config, e.g. llama."""
    device: torch.device
    dtype: torch.dtype
    """The dtype that it would be loaded in."""
    max_model_len: int
    max_encoder_tokens: int | None
    """Tokens of the longest input of its encoder; None: it has no encoder."""
    meta_model: MetaModel
    runtime: str
    """The runtime that a start is expected to choose, in words."""
    is_quantized: bool = False
    """Whether its weights would be packed as int8."""

    def weight_bytes(self) -> dict[str, int]:
        return {name: self.meta_model.weight_bytes(dtype, self.device) for name, dtype in DTYPES.items()}

    def plan(self, settings: MemorySettings) -> MemoryBudget:
        """Plan the memory as LoadedModel.plan does, with estimated activations. Raises ModelError."""
        facts = facts_of_meta_model(self.meta_model, self.dtype, self.device, settings, self.is_quantized)
        layers = self.meta_model.layers
        cross = cross_needs(layers, self.dtype, self.max_encoder_tokens)
        return plan_memory(facts, settings, group_needs(layers, self.dtype), cross)


def outline_model(candidate: CandidateModel, settings: ModelSettings) -> Outline:
    """Check the config as load_model does. Reads no weights, converts nothing; some seconds.

    Raises ModelError.
    """
    with library_errors(f"the needs of {candidate.source.name} cannot be found"):
        return _outline(candidate.source, settings)


def _outline(source: ConfigSource, settings: ModelSettings) -> Outline:
    config = read_config(source.path, source.gguf)
    prepared = prepare(config, settings)
    if source.gguf is None:
        read_ends_and_defaults(TokenizerFiles(source.path), config, prepared.max_encoder_tokens)
    dtype = prepared.dtype
    if source.gguf is not None and prepared.device.type == "cuda":
        # For a GGUF file it follows from the tensors, and a conversion would write it to config.json.
        dtype = choose_dtype(settings.dtype, prepared.device, dtype_that_keeps(open_gguf(source.path / source.gguf)))
    meta_model = build_meta_model(config, prepared.max_encoder_tokens)
    return Outline(
        name=source.name,
        architecture=config.model_type,
        device=prepared.device,
        dtype=dtype,
        max_model_len=prepared.max_model_len,
        max_encoder_tokens=prepared.max_encoder_tokens,
        meta_model=meta_model,
        runtime=expected_runtime(
            settings,
            prepared.device,
            dtype,
            is_recurrent=bool(meta_model.mixers),
            has_encoder=prepared.max_encoder_tokens is not None,
        ),
        is_quantized=settings.quantize != "none",
    )
