"""Packed weights and their product are torch's; a row's result depends on nothing but the row."""

import ctypes
from enum import IntEnum
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from services.worker.engine.native.families import rotation
from services.worker.engine.native.library import ADDRESS, INT32, INT64, declare, fields, load
from services.worker.engine.native.weights import Matrix, WeightPacker, pack
from tests.rounding import assert_within, gated_bound, product_bound


class Epilogue(IntEnum):
    """What is done to a product's result before it is written (`gemm.h`)."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2


class GemmCall(ctypes.Structure):
    """The arguments of one product, laid out as `gemm.h` has them."""

    _fields_ = fields(
        (ADDRESS, "a"), (INT64, "a_stride"), (ADDRESS, "packed c"), (INT64, "c_stride"),
        (INT32, "rows outputs inputs epilogue threads"),
    )  # fmt: skip


def multiply(
    a: torch.Tensor,
    packed: torch.Tensor,
    c: torch.Tensor,
    epilogue: Epilogue = Epilogue.STORE,
    threads: int = 1,
) -> None:
    """`c` `[rows, outputs]` from `a` `[rows, inputs]`, fp32 on the CPU, rows at any stride."""
    library = load()
    declare(library, {"gemm": (None, (ctypes.POINTER(GemmCall),))})
    at = a.data_ptr(), a.stride(0), packed.data_ptr(), c.data_ptr(), c.stride(0)
    library.gemm(GemmCall(*at, a.shape[0], c.shape[1], a.shape[1], epilogue, threads))


rows = st.one_of(st.integers(1, 26), st.sampled_from([64, 190, 200, 385]))
outputs = st.one_of(st.integers(1, 200), st.sampled_from([64, 256, 512]))
inputs = st.one_of(st.integers(1, 90), st.sampled_from([256, 512, 513, 1100]))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(weight: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    packer = WeightPacker(load())
    if up is None:
        packer.pack(weight)
    else:
        packer.pack_pair(weight, up)
    return packer.held[0]


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
    pair = packed(gate, up)
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


@pytest.mark.parametrize("value", [-100.0, -88.5, -20.0, -0.0, 0.0, 1e-8, 20.0, 88.0, 100.0, 1e19])
def test_silu_holds_at_the_borders(value: float) -> None:
    one = torch.ones(1, 1)
    pair = packed(one, one)
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


def make_module(tied: bool) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 70, "hidden_size": 24, "intermediate_size": 40, "head_dim": 10}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=9000, tie_word_embeddings=tied)
    module: Any = transformers.LlamaForCausalLM(config)
    return module.eval().requires_grad_(False)


def unpacked(matrix: Matrix) -> torch.Tensor:
    """Row by row, `[outputs, inputs]`."""
    library, found = load(), torch.empty(matrix.outputs, matrix.inputs)
    declare(library, {"matrix_row": (None, (ctypes.POINTER(Matrix), INT64, ADDRESS))})
    for output in range(matrix.outputs):
        library.matrix_row(matrix, output, found[output].data_ptr())
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_come_back_out_of_their_panels(tied: bool) -> None:
    module = make_module(tied)
    weights = pack(load(), module, 16, release=False)
    attention = module.model.layers[0].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(unpacked(weights.layers[0].heads[0]), joined)
    assert torch.equal(unpacked(weights.head), module.lm_head.weight)
    assert (weights.embedding.data == weights.head.data) == tied
    assert torch.equal(unpacked(weights.embedding), module.model.embed_tokens.weight)


def test_released_weights_are_gone_and_the_norms_are_not() -> None:
    module = make_module(True)
    pack(load(), module, 16, release=True)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    assert {name for name, size in sizes.items() if size} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }


def test_the_table_is_the_modules_rotation_at_every_position() -> None:
    module = make_module(True)
    cosine, sine = rotation(module, 8200)
    assert cosine.shape == sine.shape == (8200, 5)
    for position in (0, 1, 4095, 4096, 8199):
        expected = module.model.rotary_emb(torch.empty(1), torch.tensor([[position]]))
        torch.testing.assert_close(cosine[position].repeat(2), expected[0][0, 0], rtol=0, atol=1e-6)
        torch.testing.assert_close(sine[position].repeat(2), expected[1][0, 0], rtol=0, atol=1e-6)
