"""The tensors of the states of recurrent layers: a block has those of all of them, after some token of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from .mixer import Mixer


class StateTensors:
    """The states of a model's mixers, allocated once and zero. Block 0 is the null block: it is neither read nor written."""

    def __init__(
        self, mixers: Sequence[Mixer], num_blocks: int, device: torch.device, zeros: Callable[..., torch.Tensor]
    ) -> None:
        """zeros: allocates as torch.zeros does."""
        self.of_mixers = [
            [zeros(num_blocks, *spec.shape, dtype=spec.dtype, device=device) for spec in mixer.states]
            for mixer in mixers
        ]
        """One tensor [num_blocks, …] for each state of each mixer."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tensor for tensors in self.of_mixers for tensor in tensors)

    def fill(self, value: float) -> None:
        """Overwrite every block but the null block. For the self-check and tests."""
        for tensor in self:
            tensor[1:].fill_(value)

    def are_finite(self, blocks: torch.Tensor) -> torch.Tensor:
        """bool [N]: whether all numbers of each of the blocks [N] are finite."""
        finite = torch.ones(len(blocks), dtype=torch.bool, device=blocks.device)
        for tensor in self:
            finite &= tensor.index_select(0, blocks).flatten(1).isfinite().all(-1)
        return finite
