"""Paged attention against the definition, and keys at other workers: each row sees each key exactly once."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.backends import NativeBackend, PartialBackend, TorchBackend
from services.worker.engine.layout import build
from services.worker.engine.native import library as native
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.partition import ELSEWHERE, OWN, Homes, split, split_by_window
from services.worker.engine.remote import Partial, merge_into
from services.worker.engine.spans import PackedSpans, Span, pack
from tests.rounding import assert_within, merge_bounds
from tests.services.worker.engine.reference import Attended, problem, step_bounds
from tests.services.worker.engine.reference import expected as attended

BLOCK, Q_HEADS, KV_HEADS, DIM = 4, 4, 2, 8
SHAPE = paged.Shape(DIM**-0.5)
HOLDERS, EACH = 4, 40


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], list[int]]:
    """Sequences with blocks of one big pool, and the holder of each block."""
    free = list(range(EACH))
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 30))
        count = draw(st.integers(1, length))
        spans.append(Span(length - count, count, [free.pop() for _ in range(-(-length // BLOCK))]))
    return spans, draw(st.lists(st.integers(0, HOLDERS - 1), min_size=EACH, max_size=EACH))


def backend(pool: tuple[torch.Tensor, torch.Tensor], kind: str) -> PartialBackend:
    if kind == "native":
        return NativeBackend(native.load(), [pool], 1)
    return TorchBackend([pool], BLOCK, torch.float32)


@pytest.mark.parametrize("kind", ["native", "torch"])
@settings(max_examples=50)
@given(steps(), st.sampled_from([0, 1, 3, BLOCK, 9, 40]))
def test_parts_are_the_whole(kind: str, step: tuple[list[Span], list[int]], window: int) -> None:
    """`window`: of the layer; others see everything."""
    spans, holders = step
    rows = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    pool = randn(EACH, KV_HEADS, DIM, BLOCK), randn(EACH, KV_HEADS, BLOCK, DIM)
    query, keys, values = randn(rows, Q_HEADS, DIM), randn(rows, KV_HEADS, DIM), randn(rows, KV_HEADS, DIM)
    pools = [(pool[0].clone(), pool[1].clone()) for _ in range(HOLDERS)]
    homes = Homes(EACH)
    ids = [block if holder == OWN else EACH + block for block, holder in enumerate(holders)]
    for block, holder in enumerate(holders):
        if holder != OWN:
            homes.place([EACH + block], holder, [block])
    whole = backend(pool, kind)
    packed = pack(spans, BLOCK)
    whole.write(0, keys, values, torch.from_numpy(packed.slots))
    expected, expected_lse = whole.attend_part(0, replace(packed, window_tokens=window), query, SHAPE)
    named = [Span(s.first_position, s.count, [ids[b] for b in s.blocks]) for s in spans]
    _, parts = split_by_window(pack(named, BLOCK), homes, BLOCK, (0, window))
    assert parts[0].holder == OWN and parts[0].rows.tolist() == list(range(rows))
    output, lse = torch.zeros_like(expected), torch.full_like(expected_lse, float("-inf"))
    kept = torch.zeros(rows, dtype=torch.int64)
    for part in parts:
        index = torch.from_numpy(part.rows)
        here = backend(pools[part.holder], kind)
        here.write(0, keys[index], values[index], torch.from_numpy(part.spans.slots))
        kept[index[torch.from_numpy(part.kept)]] += 1
        result, result_lse = here.attend_part(0, part.spans, query[index], SHAPE)
        merge_into(output, lse, result, result_lse, index)
    assert kept.tolist() == [1] * rows, "each row's K and V are kept once"
    assert all(part.spans.window_tokens == window for part in parts)
    most_keys = max(span.first_position + span.count for span in spans)
    bounds = step_bounds(pool, (query, keys, values), SHAPE, most_keys=most_keys, parts=HOLDERS + 1)
    for mine, theirs, bound in zip((output, lse), (expected, expected_lse), bounds, strict=True):
        assert_within(mine, theirs, 2 * bound)  # Both are rounded.


def test_blocks_that_nobody_holds_or_that_are_missing_are_refused() -> None:
    homes = Homes(2)
    homes.place([2], 1, [7])
    with pytest.raises(ValueError, match="nobody holds"):
        split(pack([Span(4, 1, [0, 3])], BLOCK), homes, BLOCK)
    with pytest.raises(ValueError, match="1 blocks for positions"):
        pack([Span(0, 4, [0]), Span(4, 1, [0]), Span(0, 1, [1])], BLOCK)
    homes.forget([2])
    with pytest.raises(ValueError, match="nobody holds"):
        homes.locate([0, 2])


def test_a_step_whose_borrowed_blocks_are_not_seen_yet_is_whole() -> None:
    """Room for the tokens to come is no reason to leave the fast way."""
    homes = Homes(4)
    homes.place([4], 1, [0])
    packed = pack([Span(3, 1, [0, 4]), Span(0, 8, [1, 2, 4])], BLOCK)
    (own,) = split(packed, homes, BLOCK)
    assert own.spans is packed and own.rows.tolist() == list(range(9))


class Listed:
    """One holder's part, put together piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int, int, int]] = []
        """Rows, position of the first, where the table starts, end of its keys, first packed row."""
        self.blocks: list[int] = []
        self.slots: list[int] = []

    def add(self, span: Span, row: int, is_there: list[bool], blocks: list[int], *, is_own: bool) -> None:
        """Runs of rows whose own K and V are there, or are not."""
        table = len(self.blocks)
        self.blocks += [block for block, there in zip(blocks, is_there, strict=True) if there]
        at, end = span.first_position, span.first_position + span.count
        full, rest = divmod(at, BLOCK)
        seen = sum(is_there[:full]) * BLOCK + (rest if rest and is_there[full] else 0)
        while at < end:
            last = first = at // BLOCK
            while last < len(is_there) and is_there[last] == is_there[first]:
                last += 1
            until = min(end, last * BLOCK)
            count, first_row = until - at, row + at - span.first_position
            if is_there[first]:
                self.slots += [blocks[each // BLOCK] * BLOCK + each % BLOCK for each in range(at, until)]
                self.pieces.append((count, seen, table, seen + count, first_row))
                seen += count
            elif seen or is_own:
                self.slots += [ELSEWHERE] * count
                self.pieces.append((count, seen, table, seen, first_row))
            at = until


def listed(spans: Sequence[Span], homes: Homes) -> dict[int, Listed]:
    """By holder: what `split` is to say, span by span and block by block."""
    found, row = {OWN: Listed()}, 0
    for span in spans:
        needed = -(-(span.first_position + span.count) // BLOCK)
        holders, blocks = (each.tolist() for each in homes.locate(span.blocks[:needed]))
        for each in sorted({OWN, *holders}):
            is_there = [holder == each for holder in holders]
            found.setdefault(each, Listed()).add(span, row, is_there, blocks, is_own=each == OWN)
        row += span.count
    return found


def tables(spans: PackedSpans) -> list[list[int]]:
    """Of each piece, as far as it is seen."""
    seen = zip(spans.table_start, -(-spans.key_end // BLOCK), strict=False)
    return [spans.blocks[start : start + count].tolist() for start, count in seen]


@st.composite
def lent_steps(draw: st.DrawFn) -> tuple[list[Span], Homes]:
    """Decodes and chunks; runs of blocks at several holders anywhere in the tables, also beyond the rows."""
    homes, own, following = Homes(1000), 0, 1000
    spans = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 60))
        count = draw(st.sampled_from([1, 1, draw(st.integers(1, length))]))
        blocks = list(range(own, own + -(-length // BLOCK) + draw(st.integers(0, 2))))
        own += len(blocks)
        for _ in range(draw(st.integers(0, 3))):
            first = draw(st.integers(0, len(blocks) - 1))
            run = range(first, min(len(blocks), first + draw(st.integers(1, 6))))
            ids = list(range(following, following + len(run)))
            following += len(run)
            homes.place(ids, draw(st.integers(1, 3)), [draw(st.integers(0, 500)) for _ in run])
            blocks[run.start : run.stop] = ids
        spans.append(Span(length - count, count, blocks))
    return spans, homes


@settings(max_examples=300)
@given(lent_steps())
def test_parts_are_those_found_span_by_span(step: tuple[list[Span], Homes]) -> None:
    spans, homes = step
    expected = listed(spans, homes)
    parts = split(pack(spans, BLOCK), homes, BLOCK)
    assert [part.holder for part in parts] == sorted(expected)
    for part in parts:
        wanted, found = expected[part.holder], part.spans
        count, first_position, table_start, key_end, first_row = np.array(wanted.pieces).T
        rows = [row + each for row, many in zip(first_row, count, strict=True) for each in range(many)]
        assert part.rows.tolist() == rows and part.rows.dtype == np.int64
        assert found.slots.tolist() == wanted.slots and found.slots.dtype == np.int64
        assert found.first_row.tolist() == [0, *np.cumsum(count).tolist()]
        assert found.first_position.tolist() == first_position.tolist()
        assert found.key_end.tolist() == key_end.tolist()
        assert found.table_position.tolist() == [0] * len(count)
        there = [
            wanted.blocks[at : at - (-end // BLOCK)] for at, end in zip(table_start, key_end, strict=True)
        ]
        assert tables(found) == there
        for name in ("first_row", "first_position", "table_start", "table_position", "key_end", "blocks"):
            assert getattr(found, name).dtype == np.int32 and getattr(found, name).flags.c_contiguous
        if part.holder != OWN:
            assert found.blocks.tolist() == wanted.blocks, "it travels: nothing is in it that nobody sees"
            assert found.table_start.tolist() == table_start.tolist()


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60), st.booleans()), max_size=20))
def test_homes_are_what_was_placed_and_not_forgotten(changes: list[tuple[int, int, bool]]) -> None:
    """Whatever the order of the ids, as a dictionary would have it."""
    homes, known = Homes(10), dict[int, tuple[int, int]]()
    for number, (first, count, is_placed) in enumerate(changes):
        ids = range(10 + first, 10 + first + count)
        if is_placed:
            homes.place(ids, number + 1, range(count))
            known.update((each, (number + 1, block)) for block, each in enumerate(ids))
        else:
            homes.forget([*ids, 3])
            for each in ids:
                known.pop(each, None)
    everywhere = sorted(known)
    holders, blocks = homes.locate([3, *everywhere])
    pairs = list(zip(holders.tolist(), blocks.tolist(), strict=True))
    assert pairs == [(OWN, 3), *(known[each] for each in everywhere)]
    for each in set(range(10, 500)) - known.keys():
        with pytest.raises(ValueError, match=f"nobody holds block {each}"):
            homes.locate([3, each])


def test_homes_keep_no_memory_of_blocks_that_came_and_went() -> None:
    """Ids are never used again: an entry for each that ever was would grow for as long as the worker runs."""
    homes = Homes(10)
    for first in range(10, 100_000, 10):
        homes.place(range(first, first + 10), 1, range(10))
        homes.forget(range(first - 10, first))
    assert homes.locate([99_999])[0].tolist() == [1]
    assert len(homes._holder) <= 100


def test_own_ids_are_never_elsewhere() -> None:
    for ids, holder, blocks in (([1], 1, [0]), ([2], OWN, [0]), ([2, 3], 1, [0])):
        with pytest.raises(ValueError, match="cannot be"):
            Homes(2).place(ids, holder, blocks)


ROWS_, HEADS_, DIM_ = 5, 3, 20
NOTHING = torch.zeros(0, 1, 4)


def random_parts(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps; some random_parts saw no key."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, ROWS_, HEADS_, DIM_, generator=generator)
    lses = torch.randn(count, ROWS_, HEADS_, generator=generator) * 20
    unseen = torch.rand(count, ROWS_, HEADS_, generator=generator) < 0.3
    return outputs.masked_fill(unseen.unsqueeze(-1), 0.0), lses.masked_fill(unseen, float("-inf"))


def by_definition(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0)
    return (outputs.double() * weights.unsqueeze(-1)).sum(0), torch.logsumexp(lses.double(), 0)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_parts_merged_in_any_order_are_the_whole(seed: int, is_native: bool) -> None:
    library = native.load() if is_native else None
    outputs, lses = random_parts(4, seed)
    expected, expected_lse = by_definition(outputs, lses)
    bound, lse_bound = merge_bounds(outputs, lses)
    seen = expected_lse > -torch.inf
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        output, lse = outputs[order[0]].clone(), lses[order[0]].clone()
        for index in order[1:]:
            merge_into(output, lse, outputs[index], lses[index], torch.arange(ROWS_), library)
        assert_within(output, expected, bound)
        assert_within(lse[seen], expected_lse[seen], lse_bound)
        assert torch.equal(lse > -torch.inf, seen)
    merge_into(output, lse, outputs[0], torch.full_like(lse, float("nan")), torch.arange(ROWS_), library)
    assert bool(output.isnan().all()), "NaN stays visible"


@pytest.mark.parametrize("is_native", [True, False])
def test_only_the_named_rows_change(is_native: bool) -> None:
    library = native.load() if is_native else None
    outputs, lses = random_parts(2, 9)
    (output, part), (lse, part_lse), rows = outputs.clone(), lses.clone(), torch.tensor([3, 1])
    merge_into(output, lse, part[rows].contiguous(), part_lse[rows].contiguous(), rows, library)
    assert torch.equal(output[[0, 2, 4]], outputs[0, [0, 2, 4]])
    merged = outputs[:, rows], lses[:, rows]
    assert_within(output[rows], by_definition(*merged)[0], merge_bounds(*merged)[0])


class Slow:
    """A `RemoteAttention` whose calls take 1 s each, with two empty results per layer."""

    now_s = 0.0

    def _work(self, *_: object) -> None:
        self.now_s += 1.0

    begin = send = end = abandon = _work

    def collect(self, layer: int) -> Iterator[Partial]:
        for _ in range(2):
            self._work()
            yield torch.zeros(0, dtype=torch.int64), NOTHING, NOTHING[..., 0]


def run_step(attention: PagedAttention, slow: Slow, spans: Sequence[Span]) -> None:
    attention.begin(spans, 0)
    rows = sum(span.count for span in spans)
    queries, keys, values = torch.zeros(3, rows, 1, 4)
    attention.send(0, queries, keys, values, paged.Shape(1.0))
    slow.now_s += 100.0  # The caller's own work is not counted.
    attention.join(0, torch.zeros(rows, 1, 4), torch.zeros(rows, 1))
    attention.end()


def test_a_decode_steps_waiting_time_is_divided_by_its_remote_blocks() -> None:
    slow = Slow()
    attention = PagedAttention(
        [LayerShape(1, 4, 4)],
        kv_blocks=4,
        block_tokens=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mode="torch",
        clock=lambda: slow.now_s,
    )
    homes, meter = Homes(4), attention.meter
    homes.place(range(4, 14), 1, range(10))
    homes.place(range(14, 19), 2, range(5))
    attention.extend(homes, slow)
    run_step(attention, slow, [Span(9, 4, [0, 4, 5, 1])])
    assert (meter.block_s, meter.total_s) == (0.0, 5.0), "a prefill says nothing of a decode run_step"
    run_step(attention, slow, [Span(15, 1, [0, 4, 5, 6]), Span(31, 1, [1, 7, 8, 9, 10, 11, 12, 13])])
    assert meter.block_s == pytest.approx(5.0 / 10)
    run_step(attention, slow, [Span(20, 1, [*range(14, 19), 2])])
    assert meter.block_s == pytest.approx(0.5 + 0.1 * (1.0 - 0.5)) and meter.total_s == 15.0


CPU = torch.device("cpu")
BFLOAT16 = 2e-2
"""About five units of its roundoff, for numbers around 1: a certain bound would allow anything."""


@pytest.mark.parametrize("mode", ["native", "torch"])
@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 90), max_size=5),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (8, 2)]),
    dims=st.sampled_from([(8, 8), (64, 64), (128, 128), (32, 16)]),
    block_tokens=st.sampled_from([4, 16, 24, 32]),
    window_tokens=st.sampled_from([None, 1, 3, 7, 17, 50]),
    shape=st.builds(paged.Shape, st.sampled_from([0.125, 0.3]), st.sampled_from([None, 5.0])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_step_is_attention_by_the_definition(
    mode: AttentionMode,
    lengths: list[int],
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_tokens: int,
    window_tokens: int | None,
    shape: paged.Shape,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Decodes and chunks in one step write their K and V, and see the context and themselves."""
    sequences = [(length - 1, 1) for length in sorted(lengths)] + chunks
    if not sequences:
        return
    made = problem(sequences, heads=heads, dims=dims, block_tokens=block_tokens, seed=seed, unread=0.0)
    made = made.to(CPU, dtype)
    attention = PagedAttention(
        [LayerShape(heads[1], *dims)],
        kv_blocks=len(made.k_pool),
        block_tokens=block_tokens,
        dtype=dtype,
        device=CPU,
        mode=mode,
    )
    own = [made.keys_values(index) for index in range(len(sequences))]
    keys, values = (
        torch.cat([pair[part][first:] for pair, (first, _) in zip(own, sequences, strict=True)])
        for part in (0, 1)
    )
    slots = torch.from_numpy(pack(made.spans, block_tokens).slots)
    pools = attention.pools[0]
    for pool, full in zip(pools, (made.k_pool, made.v_pool), strict=True):
        pool.copy_(full)
    pools[0][slots // block_tokens, :, :, slots % block_tokens] = math.nan
    pools[1][slots // block_tokens, :, slots % block_tokens] = math.nan
    attention.begin(made.spans, len(lengths))
    output = attention.attend(0, made.query, keys, values, shape, window_tokens)
    assert torch.equal(pools[0], made.k_pool) and torch.equal(pools[1], made.v_pool), "written to its slots"
    wanted, _ = attended(made, shape.scaling, shape.softcap, window_tokens)
    assert output.dtype is dtype
    if dtype is torch.float32:
        assert_within(output, wanted, made.bounds(shape.scaling, shape.softcap, parts=2)[0])
    else:
        torch.testing.assert_close(output.float(), wanted, rtol=BFLOAT16, atol=BFLOAT16)


def merged(parts: list[Attended]) -> Attended:
    outputs, lses = zip(*parts, strict=True)
    return paged.merge(torch.stack(outputs), torch.stack(lses))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 99)
)
def test_any_partition_in_any_order_merges_to_the_whole(
    sizes: list[int], dice: random.Random, seed: int
) -> None:
    sizes[dice.randrange(len(sizes))] += 1
    made = problem([(sum(sizes) - 1, 1)], dims=(8, 8), seed=seed)
    ends = list(accumulate(sizes))
    parts = [attended(made, 0.5, seen=[(end - size, end)]) for size, end in zip(sizes, ends, strict=True)]
    dice.shuffle(parts)
    wholes = merged(parts), attended(made, 0.5), made.bounds(0.5, parts=len(sizes))
    for mine, theirs, bound in zip(*wholes, strict=True):
        assert_within(mine, theirs, bound)


def test_merging_survives_parts_without_keys_and_scores_of_any_size() -> None:
    output, lse = paged.merge(torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf))
    assert torch.equal(output, torch.zeros(3, 4)) and torch.equal(lse, torch.full((3,), -math.inf))
    output, lse = paged.merge(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[500.0], [500.0]]))
    torch.testing.assert_close(output, torch.tensor([[2.0]]))
    torch.testing.assert_close(lse, torch.tensor([500.0 + math.log(2)]))


def test_rows_of_similar_length_share_a_table_and_full_blocks_need_no_mask() -> None:
    """Else a decode of many rows in torch is slower, and no less right."""
    spans = [Span(length - 1, 1, list(range(100))) for length in (1, 9, 30, 200, 300)]
    groups, _ = build(spans, 5, block_tokens=4, window_tokens=None, dtype=torch.float32, device=CPU)
    sizes = [(group.start, group.end, group.tables.shape[1]) for group in groups]
    assert sizes == [(0, 2, 3), (2, 3, 8), (3, 5, 75)]
    full = [Span(7, 1, [4, 5]), Span(7, 1, [1, 2])]
    (group,), _ = build(full, 2, block_tokens=4, window_tokens=None, dtype=torch.float32, device=CPU)
    assert group.mask is None and group.tables.tolist() == [[4, 5], [1, 2]]
    (group,), _ = build(full, 2, block_tokens=4, window_tokens=4, dtype=torch.float32, device=CPU)
    assert group.tables.tolist() == [[5], [2]], "blocks before the window are dropped"
