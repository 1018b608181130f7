"""Operations whose bits do not depend on where in a tensor a number is, or on how many rows there are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from kvpool.worker_service.model.forward import invariant
from kvpool.worker_service.model.forward.invariant import replacing
from kvpool.worker_service.model.forward.packed_linear import PackedLinear, pack_linears, packing_works, padded_rows
from tests.model.paged import NEEDS_PACKING

CPU = torch.device("cpu")
Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "sigmoid": (torch.sigmoid, invariant.sigmoid),
    "silu": (F.silu, invariant.silu),
    "gelu": (F.gelu, invariant.gelu),
    "gelu_tanh": (
        lambda inputs: F.gelu(inputs, approximate="tanh"),
        lambda inputs: invariant.gelu(inputs, approximate="tanh"),
    ),
    "softplus": (F.softplus, invariant.softplus),
    "mish": (F.mish, invariant.mish),
    "elu": (F.elu, invariant.elu),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_that_of_torch_wherever_a_number_stands(name: str) -> None:
    theirs, ours = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = torch.cat([torch.randn(70_000) * 4, torch.tensor([-200.0, -90.0, -0.0, 0.0, 30.0, 200.0])])
    whole = ours(inputs)
    torch.testing.assert_close(whole, theirs(inputs), rtol=1e-5, atol=5e-6)
    for length in (1, 7, 48):
        pieces = torch.cat([ours(piece) for piece in torch.split(inputs[-3000:].clone(), length)])
        assert torch.equal(pieces, whole[-3000:])


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_has_the_same_rows_however_many_there_are(bias: bool) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(300, 200), torch.randn(50, 200)
    added = torch.randn(50) if bias else None
    whole = invariant.linear(inputs, weight, added)
    torch.testing.assert_close(whole, F.linear(inputs, weight, added), rtol=1e-4, atol=1e-4)
    for first, end in [(0, 1), (5, 7), (33, 97), (299, 300)]:
        assert torch.equal(invariant.linear(inputs[first:end], weight, added), whole[first:end])
    assert invariant.matmul(inputs[:0], weight.t()).shape == (0, 50)


def test_grouped_rows_go_to_the_weights_of_their_expert() -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(9, 6), torch.randn(4, 6, 5)
    result = invariant.grouped_mm(rows, weights, offs=torch.tensor([2, 2, 8, 9], dtype=torch.int32))
    expected = torch.cat([rows[:2] @ weights[0], rows[2:8] @ weights[2], rows[8:] @ weights[3]])
    torch.testing.assert_close(result, expected)


class Gate(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.sigmoid(inputs)


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 8))
        self.gate = Gate()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.gate(inputs)
        return gated @ self.weight.t()


class Norm(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-6)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Norm(), Router(), Norm()).requires_grad_(False)


def replaced(module: torch.nn.Module) -> list[str]:
    return [type(child).__name__ for child in module.modules() if "forward" in child.__dict__]


def test_modules_are_found_by_what_they_call_themselves() -> None:
    tested, inputs = model(), torch.randn(70, 8)
    before = tested(inputs)
    with replacing(tested, torch.float32, CPU):
        tested(inputs[:3])
    assert replaced(tested) == ["Router", "Gate"]
    after = tested(inputs)
    torch.testing.assert_close(after, before)
    assert torch.equal(torch.cat([tested(row) for row in torch.split(inputs, 1)]), after)
    with replacing(tested, torch.float32, CPU):
        tested(inputs[:3])
    assert replaced(tested) == ["Router", "Gate"]
    assert torch.equal(tested(inputs), after)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.bfloat16, CPU), (torch.float32, torch.device("meta"))], ids=["bfloat16", "meta"]
)
def test_elsewhere_models_stay_as_they_are(dtype: torch.dtype, device: torch.device) -> None:
    tested = model().to(dtype).to(device)
    with replacing(tested, dtype, device):
        tested(torch.zeros(3, 8, dtype=dtype, device=device))
    assert replaced(tested) == []


def test_a_model_that_fails_stays_as_it_is() -> None:
    tested = model()
    with pytest.raises(RuntimeError), replacing(tested, torch.float32, CPU):
        tested(torch.randn(3, 7))
    assert replaced(tested) == []
    tested(torch.randn(3, 8))


# -- linear layers with packed weights


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
