"""The C++ operator and plain torch say the same of the same steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.native import build
from services.worker.engine.spans import Span
from tests.rounding import assert_within
from tests.services.worker.engine.reference import step_bounds

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")
BFLOAT16 = 2e-2
"""Some five units of its roundoff, of numbers around 1: what is bounded for certain would allow anything."""


@needs_compiler
@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 90), max_size=5),
    st.lists(st.tuples(st.integers(0, 60), st.integers(2, 40)), max_size=3),
    st.sampled_from([(1, 1), (4, 2), (7, 1), (8, 2)]),
    st.sampled_from([(8, 8), (64, 64), (128, 128), (32, 16)]),
    st.sampled_from([4, 16, 24, 32]),
    st.sampled_from([None, 1, 7, 50]),
    st.sampled_from([None, 5.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_both_agree(
    lengths: list[int],
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_tokens: int,
    window_tokens: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    """Decodes and chunks in one step, over a context that both were given before."""
    spans = [(length - 1, 1) for length in sorted(lengths)] + chunks
    needed = [-(-(first + count) // block_tokens) for first, count in spans]
    generator = torch.Generator().manual_seed(len(spans))
    order = torch.randperm(sum(needed) + 1, generator=generator).tolist()
    tables = [[order.pop() for _ in range(blocks)] for blocks in needed]
    attentions = [
        PagedAttention(
            [LayerShape(heads[1], *dims)],
            kv_blocks=sum(needed) + 1,
            block_tokens=block_tokens,
            dtype=dtype,
            device=torch.device("cpu"),
            mode=mode,
        )
        for mode in ("native", "torch")
    ]
    k = torch.randn(attentions[0].pools[0][0].shape, generator=generator).to(dtype)
    v = torch.randn(attentions[0].pools[0][1].shape, generator=generator).to(dtype)
    rows = sum(count for _, count in spans)
    query = torch.randn(rows, heads[0], dims[0], generator=generator).to(dtype)
    key = torch.randn(rows, heads[1], dims[0], generator=generator).to(dtype)
    value = torch.randn(rows, heads[1], dims[1], generator=generator).to(dtype)
    outputs = []
    for attention in attentions:
        attention.pools[0][0].copy_(k)
        attention.pools[0][1].copy_(v)
        packed = [Span(*span, blocks) for span, blocks in zip(spans, tables, strict=True)]
        attention.begin(packed, len(lengths))
        outputs.append(attention.attend(0, query, key, value, paged.Shape(0.2, softcap), window_tokens))
    assert outputs[0].dtype is dtype
    if dtype is torch.float32:
        most = max((first + count for first, count in spans), default=1)
        shape = paged.Shape(0.2, softcap)
        bound, _ = step_bounds((k, v), (query, key, value), shape, most_keys=most, parts=2)
        assert_within(outputs[0], outputs[1], 2 * bound)  # Both are rounded.
    else:
        torch.testing.assert_close(*outputs, rtol=BFLOAT16, atol=BFLOAT16)
    for mine, theirs in zip(attentions[0].pools[0], attentions[1].pools[0], strict=True):
        assert torch.equal(mine, theirs)
