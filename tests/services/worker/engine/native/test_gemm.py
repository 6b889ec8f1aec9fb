"""The packed product is torch's, for shapes of every kind; a row's result depends on nothing but the row."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from services.worker.engine.native.arena import Arena
from services.worker.engine.native.library import load
from services.worker.engine.native.weights import Gemm
from tests.rounding import assert_within, gated_bound, product_bound
from tests.services.worker.engine.native.products import Epilogue, multiply

GEMM = Gemm(load())
rows = st.one_of(st.integers(1, 26), st.sampled_from([64, 190, 200, 385]))
outputs = st.one_of(st.integers(1, 200), st.sampled_from([64, 256, 512]))
inputs = st.one_of(st.integers(1, 90), st.sampled_from([256, 512, 513, 1100]))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(*weights: torch.Tensor) -> torch.Tensor:
    outputs = sum(weight.shape[0] for weight in weights)
    return GEMM.pack(weights, Arena(GEMM.packed_floats(outputs, weights[0].shape[1])))


@settings(max_examples=120)
@given(rows, outputs, inputs, st.booleans(), st.integers(0, 5), st.integers(0, 2**31))
def test_the_product_is_torchs(rows: int, outputs: int, inputs: int, add: bool, gap: int, seed: int) -> None:
    a = random(rows, inputs + gap, seed=seed)[:, :inputs]
    weight = random(outputs, inputs, seed=seed + 1)
    c = random(rows, outputs + gap, seed=seed + 2)
    beside = c[:, outputs:].clone()
    added = c[:, :outputs].clone() if add else None
    expected = a.double() @ weight.double().T + (0 if added is None else added.double())
    multiply(a, packed(weight), c[:, :outputs], Epilogue.ADD if add else Epilogue.STORE)
    assert_within(c[:, :outputs], expected, product_bound(a, weight, added))
    assert torch.equal(c[:, outputs:], beside)


@settings(max_examples=80)
@given(rows, outputs, inputs, st.integers(0, 2**31))
@example(385, 160, 1100, 28)  # With AVX-512 off by 0.0056: much, and no more than so long a sum may be.
def test_a_pair_is_multiplied_through_silu(rows: int, outputs: int, inputs: int, seed: int) -> None:
    a = random(rows, inputs, seed=seed)
    gate, up = random(outputs, inputs, seed=seed + 1), random(outputs, inputs, seed=seed + 2)
    pair = GEMM.pack_pair(gate, up, Arena(GEMM.packed_pair_floats(outputs, inputs)))
    c = torch.full((rows, outputs), float("nan"))
    multiply(a, pair, c, Epilogue.SILU_MUL)
    doubled = a.double()
    exact = functional.silu(doubled @ gate.double().T) * (doubled @ up.double().T)
    assert_within(c, exact, gated_bound(a, gate, up))


@settings(max_examples=40)
@given(st.integers(2, 230), outputs, inputs, st.integers(1, 3), st.data())
def test_a_row_is_the_same_to_the_bit_in_any_company(
    rows: int, outputs: int, inputs: int, threads: int, data: st.DataObject
) -> None:
    a, weight = random(rows, inputs, seed=rows), packed(random(outputs, inputs, seed=outputs))
    together, alone = torch.empty(rows, outputs), torch.empty(1, outputs)
    multiply(a, weight, together, threads=threads)
    row = data.draw(st.integers(0, rows - 1))
    multiply(a[row : row + 1], weight, alone)
    assert torch.equal(together[row], alone[0])


def test_matrices_packed_as_one_stand_one_after_the_other() -> None:
    parts = [random(count, 37, seed=count) for count in (70, 1, 64)]
    c = torch.empty(37, 135)
    multiply(torch.eye(37), packed(*parts), c)
    assert torch.equal(c.T, torch.cat(parts))


@pytest.mark.parametrize("value", [-100.0, -88.5, -20.0, -0.0, 0.0, 1e-8, 20.0, 88.0, 100.0, 1e19])
def test_silu_holds_at_the_borders(value: float) -> None:
    one = torch.ones(1, 1)
    pair = GEMM.pack_pair(one, one, Arena(GEMM.packed_pair_floats(1, 1)))
    c = torch.empty(1, 1)
    multiply(torch.full((1, 1), value), pair, c, Epilogue.SILU_MUL)
    expected = functional.silu(torch.tensor(value).double()) * value
    torch.testing.assert_close(c[0, 0].double(), expected, rtol=1e-6, atol=1e-33)


def test_what_is_not_a_number_stays_so() -> None:
    weight = packed(random(80, 40, seed=1))
    a = random(7, 40, seed=2)
    a[3, 20] = float("nan")
    c = torch.zeros(7, 80)
    multiply(a, weight, c)
    assert c[3].isnan().all() and c[[0, 1, 2, 4, 5, 6]].isfinite().all()
