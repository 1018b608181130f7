"""Weights of int8 for the native step: one scale for each output, no zero point."""

from __future__ import annotations

import torch

_LARGEST = 127
_ADDED = 128
"""csrc/quantized.h says why."""


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [outputs, inputs] to the nearest of the steps of each output, its largest number / 127.

    Returns numbers, uint8 [outputs, inputs], and scales, float32 [outputs]: weight ≈ (numbers − 128) · scales. NaN or infinity in
    an output makes its scale NaN or infinite, and so what it computes.
    """
    exact = weight.float()
    scales = exact.abs().amax(1) / _LARGEST
    factors = torch.where(scales > 0, 1 / scales, 0.0)
    numbers = exact.mul_(factors[:, None]) if exact is not weight else exact * factors[:, None]
    return numbers.round_().nan_to_num_(0).clamp_(-_LARGEST, _LARGEST).add_(_ADDED).to(torch.uint8), scales
