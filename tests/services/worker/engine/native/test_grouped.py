"""Products with weights in groups are exact up to the rounding of activations, and alike in any company."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.native import build, grouped
from services.worker.engine.native.grouped import Grouped
from services.worker.engine.native.library import load
from services.worker.engine.native.weights import Matrix, WeightPacker

KINDS = [
    grouped.FOUR_HALVES,
    grouped.FOUR_FLOATS,
    grouped.EIGHT_HALVES,
    grouped.EIGHT_FLOATS,
    grouped.EIGHT_SIXTEEN,
]
MOST = 127
"""Largest number of an activation."""
STORE, ADD, SILU, GELU = range(4)


def multiply(
    library: ctypes.CDLL,
    matrix: Matrix,
    a: torch.Tensor,
    epilogue: int = STORE,
    threads: int = 1,
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the product `[rows, outputs]`, in memory that nothing is written beside."""
    rows, inputs = a.shape
    around = torch.full((rows, matrix.outputs + 6), 7.0)
    c = around[:, 3:-3]
    c.copy_(torch.zeros(rows, matrix.outputs) if onto is None else onto)
    scratch = torch.empty(rows * library.matrix_scratch(inputs))
    strides = ctypes.c_int64(a.stride(0)), ctypes.c_int64(c.stride(0))
    library.matrix_multiply.argtypes = None  # type: ignore[assignment]
    address = [ctypes.c_void_p(each.data_ptr()) for each in (a, c, scratch)]
    library.matrix_multiply(
        ctypes.byref(matrix),
        address[0],
        strides[0],
        address[1],
        strides[1],
        rows,
        epilogue,
        threads,
        address[2],
    )
    assert (around[:, :3] == 7).all() and (around[:, -3:] == 7).all()
    return c


def random_weights(kind: int, outputs: int, inputs: int, seed: int) -> Grouped:
    torch.manual_seed(seed)
    four = kind in (grouped.FOUR_HALVES, grouped.FOUR_FLOATS)
    groups = inputs // (16 if kind == grouped.EIGHT_SIXTEEN else 32)
    numbers = torch.randint(0, 16 if four else 256, (outputs, inputs), dtype=torch.uint8)
    scales, least = torch.rand(outputs, groups) * 0.02, torch.randn(outputs, groups) * 0.05
    if kind in (grouped.FOUR_HALVES, grouped.EIGHT_HALVES):
        scales, least = scales.half().float(), least.half().float()
    return Grouped(kind, numbers, scales, least if four or kind == grouped.EIGHT_FLOATS else None)


def rounded(a: torch.Tensor) -> torch.Tensor:
    """Activations in 8 bits by groups of 32, in fp64."""
    numbers, scales = numbered(a)
    return (numbers.round() * scales).flatten(1)


def exact_and_bound(a: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product with fp64 weights, and how far off one of the library may be."""
    numbers, scales = numbered(a)
    is_tie = ((numbers - numbers.floor() - 0.5).abs() < 1e-6 * MOST).double()  # either way is right
    around = rounded(a).abs() * 1e-6 + (is_tie * scales).flatten(1)
    return rounded(a) @ wide.T, around @ wide.abs().T + 1e-6


def numbered(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations in units of their group's scale, and that, in fp64."""
    groups = a.reshape(len(a), -1, 32)
    widest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(widest > 0, MOST / widest, 0.0)
    return groups.double() * inverse.double(), (widest / MOST).double()


@pytest.mark.parametrize("kind", KINDS)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 50),
    groups=st.integers(1, 6),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 999),
)
@settings(max_examples=15)
def test_the_product_is_that_of_rounded_activations(
    kind: int, rows: int, outputs: int, groups: int, threads: int, seed: int
) -> None:
    weights, library = random_weights(kind, outputs, 32 * groups, seed), load()
    packer = WeightPacker(library)
    matrix = packer.pack(weights)
    a, onto = torch.randn(rows, 32 * groups), torch.randn(rows, outputs)
    wide = weights.values().double()
    exact, bound = exact_and_bound(a, wide)
    product = multiply(library, matrix, a, threads=threads)
    assert ((product - exact).abs() <= bound).all()
    assert torch.equal(multiply(library, matrix, a, ADD, threads, onto), onto + product)
    row = torch.empty(32 * groups)
    library.matrix_row(ctypes.byref(matrix), ctypes.c_int64(outputs - 1), ctypes.c_void_p(row.data_ptr()))
    torch.testing.assert_close(row, weights.values()[-1], rtol=0, atol=1e-6)
    alone = torch.cat([multiply(library, matrix, a[at : at + 1]) for at in range(rows)])
    assert torch.equal(alone, product)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or build.find_compiler() is None, reason="needs x86-64 and a C++ compiler"
)
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-DKVASIR_PORTABLE"])
def test_every_instruction_set_gives_the_same_bits(flag: str, tmp_path: Path) -> None:
    sources = [str(build.SOURCES / f"{name}.cpp") for name in ("grouped", "gemm")]
    command = [str(build.find_compiler()), *build.FLAGS, flag, "-O1", "-shared", *sources]
    subprocess.run([*command, "-o", str(tmp_path / "other.so")], check=True, timeout=100)
    other, packer, a = ctypes.CDLL(str(tmp_path / "other.so")), WeightPacker(load()), torch.randn(11, 96)
    other.matrix_scratch.restype = ctypes.c_int64
    for kind in KINDS:
        matrix = packer.pack(random_weights(kind, 37, 96, kind))
        assert torch.equal(multiply(other, matrix, a), multiply(load(), matrix, a))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate", [SILU, GELU])
@pytest.mark.parametrize("outputs", [8, 13, 40])
def test_a_pair_goes_through_its_gate(kind: int, gate: int, outputs: int) -> None:
    parts = [random_weights(kind, outputs, 64, seed) for seed in (1, 2)]
    packer, a = WeightPacker(load()), torch.randn(9, 64) * 3
    pair = packer.pack_pair(*parts)
    found = multiply(load(), pair, a, gate)
    assert torch.equal(found, torch.cat([multiply(load(), pair, a[at : at + 1], gate) for at in range(9)]))
    gated, up = (rounded(a) @ part.values().double().T for part in parts)
    through = (
        torch.nn.functional.silu(gated)
        if gate == SILU
        else torch.nn.functional.gelu(gated, approximate="tanh")
    )
    torch.testing.assert_close(found.double(), through * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_stays_so_and_alone(kind: int, poison: float) -> None:
    packer, a = WeightPacker(load()), torch.randn(6, 64)
    a[2, 40] = poison
    product = multiply(load(), packer.pack(random_weights(kind, 20, 64, 3)), a)
    assert not product[2].isfinite().any() and product[[0, 1, 3, 4, 5]].isfinite().all()


def test_rows_of_zeros_give_zeros() -> None:
    packer = WeightPacker(load())
    matrix = packer.pack(random_weights(grouped.FOUR_HALVES, 20, 64, 3))
    assert torch.equal(multiply(load(), matrix, torch.zeros(3, 64)), torch.zeros(3, 20))


@pytest.mark.parametrize("bits", [8, 4])
def test_values_are_rounded_to_the_nearest_number_of_their_group(bits: int) -> None:
    values = torch.randn(24, 96)
    values[3, :32] = 0.25  # a group without extent
    found = grouped.of_values(values, bits)
    step = found.scales.repeat_interleave(32, 1)
    assert ((found.values() - values).abs() <= 0.51 * step + 2e-3 * values.abs()).all()


@pytest.mark.parametrize("epilogue", [STORE, ADD, SILU, GELU])
@pytest.mark.parametrize("rows", [1, 6, 7, 18, 19, 200])
def test_bf16_weights_are_computed_as_their_values(rows: int, epilogue: int) -> None:
    torch.manual_seed(rows)
    weights = [torch.randn(37, 530).bfloat16().float() for _ in range(2)]
    a, onto = torch.randn(rows, 530), torch.randn(rows, 37)
    made = []
    for halves in (False, True):
        packer = WeightPacker(load(), halves=halves)
        matrix = packer.pack_pair(*weights) if epilogue >= SILU else packer.pack(weights[0])
        assert list(packer.kinds) == [grouped.HALVES if halves else grouped.FLOATS]
        made.append(multiply(load(), matrix, a, epilogue, onto=onto))
        row = torch.empty(530)
        if epilogue == STORE:
            load().matrix_row(ctypes.byref(matrix), ctypes.c_int64(36), ctypes.c_void_p(row.data_ptr()))
            assert torch.equal(row, weights[0][36])
    assert torch.equal(*made)
    alone = torch.cat(
        [multiply(load(), matrix, a[at : at + 1], epilogue, onto=onto[at : at + 1]) for at in range(rows)]
    )
    assert torch.equal(alone, made[1])
