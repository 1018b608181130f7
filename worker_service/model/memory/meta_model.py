"""A model's memory needs from its config alone: built on torch's meta device, where tensors have shapes and no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ...attention.interface import ATTENTION_NAME, register
from ..errors import UnsupportedModel
from ..forward.layers import AttentionLayer, bound, find_attention_layers, placeholder
from ..forward.mixer import Mixer
from ..forward.mixers import find_mixers
from ..forward.packed_linear import packing_works
from ..forward.seq2seq import Seq2Seq, find_decoder_layers
from ..language_model import build_language_model
from ..progress import quiet_transformers

META = torch.device("meta")
SAMPLER_BYTES_PER_LOGIT = 24
"""Besides the model's own logit: the float32 copy, its sorted copy with int64 ranks, and probabilities twice."""


_MOST_SCANNED = 256
_DRAWN_IN = torch.bfloat16
"""Some operators run on the meta device only in this dtype; shapes do not depend on it."""


@dataclass(frozen=True, slots=True, eq=False)
class MetaModel:
    """A model without its weights."""

    model: Any
    """The model on the meta device, where it can run."""
    layers: list[AttentionLayer]
    mixers: list[Mixer]
    seq2seq: Seq2Seq | None = None
    """The model's two halves; None: it has no encoder."""
    max_encoder_tokens: int = 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(int(parameter.numel()) for parameter in self.model.parameters())

    def weight_bytes(self, dtype: torch.dtype, device: torch.device, is_quantized: bool = False) -> int:
        """Size of parameters in the dtype, those of linear layers in int8 if quantized, and of buffers, on the device; see
        load_model."""
        total = self.num_parameters * dtype.itemsize
        if is_quantized:
            linears = {module.weight for module in self.model.modules() if type(module) in (torch.nn.Linear, Conv1D)}
            total -= sum(int(weight.numel()) for weight in linears) * (dtype.itemsize - torch.int8.itemsize)
        for buffer in self.model.buffers():
            follows = buffer.dtype == _DRAWN_IN  # others keep their own dtype
            total += int(buffer.numel()) * (dtype if follows else buffer.dtype).itemsize
        head, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if device.type == "cpu" and not is_quantized and type(head) is torch.nn.Linear and packing_works(dtype):
            # Packing copies the weight of a tied head, which it shares with the embeddings.
            total += int(head.weight.numel()) * dtype.itemsize if head.weight is embeddings.weight else 0
        return total

    def activation_bytes(self, dtype: torch.dtype, num_tokens: int, num_sequences: int) -> int:
        """Largest sum of the intermediate results of a step in bytes, with sampling, without those inside attention.

        Raises UnsupportedModel if the model does not run without values.
        """
        meter = _LiveBytes(self.model)
        modules = [layer.module for layer in self.layers]
        selected: list[torch.utils.hooks.RemovableHandle] = []
        try:
            # Scans of recurrent layers may go token by token, which takes as long without values: their needs are scaled up.
            num_run = min(num_tokens, _MOST_SCANNED) if self.mixers else num_tokens
            tokens = torch.zeros(1, num_run, dtype=torch.int64, device=META)
            rows = torch.zeros(min(num_sequences, num_tokens), dtype=torch.int64, device=META)
            selected.append(self.model.get_output_embeddings().register_forward_pre_hook(_select(rows)))
            with bound(modules, placeholder), torch.inference_mode(), meter:
                if self.seq2seq is None:
                    logits = self.model(input_ids=tokens, position_ids=tokens, use_cache=False).logits
                else:
                    self.seq2seq.encode(torch.zeros(1, self.max_encoder_tokens, dtype=torch.int64, device=META))
                    logits = self.seq2seq.decode(tokens, tokens, self.seq2seq.blank_output(1, META))
        except Exception as error:
            raise _unknown(self.model.config, error) from error
        finally:
            for hook in selected:
                hook.remove()
        results = meter.peak_bytes * num_tokens // num_run * dtype.itemsize // _DRAWN_IN.itemsize
        return max(results, int(logits.numel()) * (dtype.itemsize + SAMPLER_BYTES_PER_LOGIT))


def build_meta_model(config: Any, max_encoder_tokens: int | None = None) -> MetaModel:
    """Build the model on the meta device. Takes tenths of a second and little memory for models of any size. max_encoder_tokens: of
    its encoder's longest input; None: it has none.

    Raises UnsupportedModel if its code cannot run there.
    """
    register()
    try:
        with quiet_transformers(), META:
            model = build_language_model(deepcopy(config), dtype=_DRAWN_IN, attn_implementation=ATTENTION_NAME).eval()
        if max_encoder_tokens is None:
            return MetaModel(model, find_attention_layers(model, META), find_mixers(model, META))
        seq2seq = Seq2Seq(model)
        return MetaModel(model, find_decoder_layers(seq2seq, META), [], seq2seq, max_encoder_tokens)
    except UnsupportedModel:
        raise
    except Exception as error:  # not all models' code supports tensors without values
        raise _unknown(config, error) from error


def _unknown(config: Any, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"The needs of {config.model_type} are unknown without its weights: {type(error).__name__}: {error}"
    )


def _select(rows: torch.Tensor) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    return lambda _, inputs: (inputs[0][:, rows], *inputs[1:])


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storages that are alive between operations, without the model's own."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_bytes = 0
        self.peak_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self._live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live_bytes -= num_bytes
