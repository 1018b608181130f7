"""Linear layers with packed weights compute what the plain ones do."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from kvpool.worker_service.model.forward.packed_linear import PackedLinear, pack_linears, packing_works, padded_rows
from tests.model.paged import NEEDS_PACKING

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 17, 300])
def test_equals_linear(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    if not packing_works(dtype):
        pytest.skip(f"no packed {dtype} products on this CPU")
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)
    inputs = torch.randn(1, num_rows, 48).to(dtype)
    result = PackedLinear(linear.weight, linear.bias)(inputs)
    assert result.shape == (1, num_rows, 80)
    torch.testing.assert_close(result, linear(inputs), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@NEEDS_PACKING
@pytest.mark.parametrize("sizes", [(48, 80), (1536, 64), (30, 17)], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(sizes: tuple[int, int]) -> None:
    """In float32; long sums are those that would be cut in other places."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(*sizes).requires_grad_(False)
    packed = PackedLinear(linear.weight, linear.bias)
    inputs = torch.randn(1, 600, sizes[0])
    whole = packed(inputs)
    for first, end in [(0, 1), (599, 600), (7, 9), (3, 20), (64, 129), (100, 357)]:
        assert torch.equal(packed(inputs[:, first:end]), whole[:, first:end])
    assert torch.equal(packed(inputs[0, 5]), whole[0, 5])


def test_products_have_few_numbers_of_rows() -> None:
    """oneDNN keeps the code that it generates for each number."""
    padded = [padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert len(set(padded)) == 71
    assert all(num_rows <= padded_rows(num_rows) <= num_rows * 9 / 8 for num_rows in range(2, 2049))
    assert all(padded_rows(num_rows) == num_rows for num_rows in (2, 3, 16, 64, 512, 2048))


@NEEDS_PACKING
def test_conv1d_is_a_linear_with_its_weight_transposed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Conv1D(80, 48)).requires_grad_(False)
    inputs = torch.randn(1, 5, 48)
    expected = model(inputs)
    assert pack_linears(model) == 1
    torch.testing.assert_close(model(inputs), expected, rtol=1e-5, atol=1e-5)


def test_only_plain_linears_are_replaced_and_shared_weights_stay() -> None:
    class OwnLinear(torch.nn.Linear):
        pass

    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, OwnLinear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4)), head)
    model.requires_grad_(False)
    tokens = torch.arange(10)[None]
    expected = copy.deepcopy(model)(tokens)
    if not packing_works(torch.float32):
        assert pack_linears(model) == 0
        return
    assert pack_linears(model) == 2
    assert type(model[1]) is OwnLinear
    torch.testing.assert_close(model(tokens), expected)
    assert model[0].weight is embedding.weight
