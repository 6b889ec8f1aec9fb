"""The function that transformers' layers call: K and V land in the sequence's blocks and nowhere else."""

from types import SimpleNamespace

import torch

from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.spans import Span


def make_attention() -> PagedAttention:
    return PagedAttention(
        [LayerShape(1, 8, 8), LayerShape(1, 8, 8)],
        kv_blocks=6,
        block_tokens=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def random_packed(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 2, rows, 8, generator=generator)
    key, value = torch.randn(2, 1, 1, rows, 8, generator=generator).unbind(0)
    return query, key, value


def run(attention: PagedAttention, spans: list[Span], decodes: int, layer: int, seed: int) -> torch.Tensor:
    attention.begin(spans, decodes)
    packed = random_packed(sum(span.count for span in spans), seed)
    output, weights = attention(SimpleNamespace(layer_idx=layer), *packed, None, scaling=0.35)
    assert weights is None
    return output


def test_output_is_causal_attention_of_each_span_alone() -> None:
    spans = [Span(0, 5, [3, 1]), Span(0, 3, [0])]
    output = run(make_attention(), spans, 0, layer=0, seed=1)
    query, key, value = random_packed(8, seed=1)
    for start, end in ((0, 5), (5, 8)):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=0.35,
            enable_gqa=True,
        )
        torch.testing.assert_close(output[:, start:end], expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_chunked_span_gives_what_a_whole_one_does() -> None:
    whole = run(make_attention(), [Span(0, 9, [3, 1, 4])], 0, layer=1, seed=2)
    attention = make_attention()
    query, key, value = random_packed(9, seed=2)
    parts = []
    for first, end in ((0, 2), (2, 6), (6, 8), (8, 9)):
        attention.begin([Span(first, end - first, [3, 1, 4])], int(end - first == 1))
        q, k, v = (packed[:, :, first:end] for packed in (query, key, value))
        parts.append(attention(SimpleNamespace(layer_idx=1), q, k, v, None, scaling=0.35)[0])
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)


def test_layers_and_other_blocks_are_left_alone() -> None:
    attention = make_attention()
    before = run(attention, [Span(0, 4, [0]), Span(0, 4, [1])], 0, layer=0, seed=3)
    run(attention, [Span(0, 8, [0, 1])], 0, layer=1, seed=4)
    run(attention, [Span(0, 8, [4, 5])], 0, layer=0, seed=5)
    attention.begin([Span(3, 1, [0]), Span(3, 1, [1])], 2)
    query, key, value = (packed[:, :, [3, 7]] for packed in random_packed(8, seed=3))
    again, _ = attention(SimpleNamespace(layer_idx=0), query, key, value, None, scaling=0.35)
    torch.testing.assert_close(again[0], before[0, [3, 7]], rtol=1e-5, atol=1e-5)
