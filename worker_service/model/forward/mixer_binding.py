"""Mixers in service: their forward gets a packed row of tokens, and goes on from the states of the row's sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...step import StateBlocks
from .kv_cache import StateTensors
from .mixer import Mixer, MixerCall, MixerForward, MixerPiece, join

_REPLACED = "kvpool_replaced_forward"
"""Attribute of a bound module: its own `forward` attribute before, None if it had none."""


class Snapshots(NamedTuple):
    """Sequences whose states after the step are kept, too. Tensors [S] int64."""

    blocks: torch.Tensor
    """Blocks that get a copy of the states."""
    sources: torch.Tensor
    """Index in `running` of the sequence that each copy is from."""
    last_rows: torch.Tensor
    """Place in the packed row of the last token that each state has seen."""


class StepStates(NamedTuple):
    """A step as mixers see it."""

    pieces: Sequence[MixerPiece]
    running: torch.Tensor
    """[sequences] int64: blocks that get the states after the step, in the order of the pieces."""
    snapshots: Snapshots | None


def lay_out(
    offsets: Sequence[int], query_lens: Sequence[int], blocks: Sequence[StateBlocks], device: torch.device
) -> StepStates:
    """Divide a step into pieces: all single tokens that go on, all that begin, and each longer part by itself.

    Longer parts are never computed together, so that the result of a chunk does not depend on its neighbours.
    """

    def on_device(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    single = [index for index, length in enumerate(query_lens) if length == 1]
    going_on = [index for index in single if blocks[index].source]
    beginning = [index for index in single if not blocks[index].source]
    order: list[int] = []
    pieces: list[MixerPiece] = []
    for parts in filter(None, (going_on, beginning)):
        sources = on_device([blocks[index].source for index in parts]) if parts is going_on else None
        pieces.append(MixerPiece(on_device([offsets[index] for index in parts]), len(parts), 1, sources))
        order += parts
    for index, length in enumerate(query_lens):
        if length > 1:
            source = blocks[index].source
            first = offsets[index]
            pieces.append(MixerPiece.of_one(first, first + length, on_device([source]) if source else None))
            order.append(index)
    with_snapshot = [number for number, index in enumerate(order) if blocks[index].snapshot]
    snapshots = None
    if with_snapshot:
        parts = [order[number] for number in with_snapshot]
        snapshots = Snapshots(
            on_device([blocks[index].snapshot for index in parts]),
            on_device(with_snapshot),
            on_device([offsets[index] + query_lens[index] - 1 for index in parts]),
        )
    return StepStates(pieces, on_device([blocks[index].running for index in order]), snapshots)


class MixerBinding:
    """Binds the mixers of a model to the states of a cache, until `release`; replaces earlier bindings."""

    def __init__(self, mixers: Sequence[Mixer], states: StateTensors | None) -> None:
        self._step: StepStates | None = None
        self._bound = [
            _BoundMixer(mixer, tensors, self._now)
            for mixer, tensors in zip(mixers, [] if states is None else states.of_mixers, strict=True)
        ]

    def begin(self, step: StepStates) -> None:
        """Set the step that the next forward pass computes."""
        self._step = step

    def release(self) -> None:
        """Restore the modules."""
        for bound in self._bound:
            bound.release()

    def _now(self) -> StepStates:
        assert self._step is not None, "a mixer runs before begin"
        return self._step


class _BoundMixer:
    """A mixer whose forward is replaced."""

    def __init__(self, mixer: Mixer, tensors: Sequence[torch.Tensor], step: Callable[[], StepStates]) -> None:
        self._mixer = mixer
        self._tensors = tensors
        self._step = step
        self.release()
        own = mixer.module.__dict__
        own[_REPLACED] = own.get("forward")
        self._forward = MixerForward.of(mixer)
        own["forward"] = self._run

    def release(self) -> None:
        """Restore the module; does nothing if it is not bound."""
        own = self._mixer.module.__dict__
        if _REPLACED not in own:
            return
        replaced = own.pop(_REPLACED)
        if replaced is None:
            del own["forward"]
        else:
            own["forward"] = replaced

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward for a packed row. States are written after all have been read."""
        step = self._step()
        call = MixerCall(self._mixer, self._forward, args, kwargs)
        outputs, after = [], []
        for piece in step.pieces:
            before = None if piece.sources is None else [tensor[piece.sources] for tensor in self._tensors]
            output, states = call.run(piece, before)
            outputs.append(output)
            after.append(states)
        for tensor, *states in zip(self._tensors, *after, strict=True):
            new = states[0] if len(states) == 1 else torch.cat(states)
            tensor.index_copy_(0, step.running, new)
            if step.snapshots is not None:
                tensor.index_copy_(0, step.snapshots.blocks, new.index_select(0, step.snapshots.sources))
        return join(outputs, lambda tensors: _in_row(step.pieces, tensors))


def _in_row(pieces: Sequence[MixerPiece], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces' outputs [sequences, tokens, …] as one packed row [1, tokens, …]."""
    num_tokens = sum(piece.num_sequences * piece.num_tokens for piece in pieces)
    row = tensors[0].new_empty(1, num_tokens, *tensors[0].shape[2:])
    for piece, tensor in zip(pieces, tensors, strict=True):
        row[0, piece.rows] = tensor[0] if isinstance(piece.rows, slice) else tensor[:, 0]
    return row
