"""CPUs that this one is not: matrix products that add in other orders, where the real ones are.

They replace the operators below the functions of torch, for every caller: whatever calls a matrix product computes on that CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten

Cuts = Callable[[int], Sequence[tuple[int, int]]]
"""The ranges of k of which a product over K terms is put together, in the order in which they are added."""
Turned = Callable[[int, int, int], bool]
"""Whether the row of this index, in a product with M rows and N columns, adds its first term last."""


def in_halves(limit: int) -> Cuts:
    """One pass over up to `limit` terms, two halves of up to twice as many, else passes of `limit`: as measured on Zen 4 and 5."""

    def cuts(num_terms: int) -> Sequence[tuple[int, int]]:
        if limit < num_terms <= 2 * limit:
            middle = (num_terms + 1) // 2
            return [(0, middle), (middle, num_terms)]
        return fixed(limit)(num_terms)

    return cuts


def fixed(length: int) -> Cuts:
    """Passes of `length` from the first term on: zeros at the end change nothing."""
    return lambda num_terms: [(first, min(first + length, num_terms)) for first in range(0, num_terms, length)]


def rest_first(length: int) -> Cuts:
    """Passes of `length`, and before them what is left over."""

    def cuts(num_terms: int) -> Sequence[tuple[int, int]]:
        rest = num_terms % length
        whole = [(first, first + length) for first in range(rest, num_terms, length)]
        return [(0, rest), *whole] if rest else whole

    return cuts


def odd_rows(row: int, num_rows: int, num_columns: int) -> bool:
    """The place of a row decides."""
    return row % 2 == 1


def odd_rows_of_odd_widths(row: int, num_rows: int, num_columns: int) -> bool:
    """The place of a row decides if the columns are no multiple of 4."""
    return row % 2 == 1 and num_columns % 4 != 0


class FakeBlas(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, matrix products add as `cuts` and `turned` say; the fused attention kernel is made of such products."""

    def __init__(self, cuts: Cuts, turned: Turned = lambda *_: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuts, self._turned = cuts, turned
        self.num_products = 0
        """That were asked for, so that a test sees that it was this CPU's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (_aten.matmul.default, _aten.bmm.default, _aten.mm.default):
            return self._product(*args)
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return self._attend(*args, **(kwargs or {}))
        if func is _aten.logsumexp.default:
            return _log_sum_exp(args[0])[..., 0]
        return func(*args, **(kwargs or {}))

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left [..., M, K] · right [..., K, N]."""
        self.num_products += 1
        num_rows, num_columns = left.shape[-2], right.shape[-1]
        terms = (left[..., None] * right[..., None, :, :]).transpose(-1, -2)
        usual = self._sum(terms)
        turned = [self._turned(row, num_rows, num_columns) for row in range(num_rows)]
        if not any(turned):
            return usual
        first_last = self._sum(terms[..., 1:]) + terms[..., 0]
        return torch.where(torch.tensor(turned)[:, None], first_last, usual)

    def _sum(self, terms: torch.Tensor) -> torch.Tensor:
        """Of the last dimension, the parts one after the other."""
        total: torch.Tensor | None = None
        for first, end in self._cuts(terms.shape[-1]):
            part = _sum_of_pairs(terms[..., first:end])
            total = part if total is None else total + part
        assert total is not None, "a product has terms"
        return total

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As torch's fused kernel: out [B, Hq, T, Dv], lse [B, Hq, T]."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = self._product(query, key.transpose(-1, -2)) * scale
        if attn_mask is not None:
            scores = scores + attn_mask
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        lse = _log_sum_exp(scores)
        return self._product(torch.exp(scores - lse), value), lse[..., 0]


def _log_sum_exp(scores: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, which becomes 1; −inf at the end changes nothing."""
    peak = scores.amax(-1, keepdim=True)
    return peak + torch.log(_sum_of_pairs(torch.exp(scores - peak)))[..., None]


def _sum_of_pairs(terms: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, by elementwise additions only; zeros at the end change nothing, however many they are."""
    length = 1 << (terms.shape[-1] - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, length - terms.shape[-1]))
    while length > 1:
        length //= 2
        terms = terms[..., :length] + terms[..., length:]
    return terms[..., 0]


class InexactCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, even the product of two numbers depends on where in a tensor they stand: nothing can be promised."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.mul.Tensor and result.dtype == torch.float32:
            return _disturbed(result)
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return _disturbed(result[0]), result[1]
        return result


def _disturbed(tensor: torch.Tensor) -> torch.Tensor:
    factors = torch.ones(tensor.numel())
    factors[::3] += 2**-20
    return tensor * factors.view(tensor.shape)
