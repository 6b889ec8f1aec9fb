"""The C++ operator against attention's definition: any shape, block size, window, dtype and partition."""

import copy
import dataclasses
import logging
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.native import build, library
from services.worker.engine.native.weights import Arena
from services.worker.engine.spans import PackedSpans
from shared.errors import ConfigError, InternalError
from tests.rounding import assert_within
from tests.services.worker.engine.reference import Attended, expected, problem

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the operator."""

    block_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    rows: tuple[tuple[int, int], ...]
    """(first position, count) of each span."""
    dtype: torch.dtype = torch.float32
    window_tokens: int | None = None
    softcap: float | None = None
    sharpness: float = 1.0
    """Of the scores, in standard deviations. Rounding errors grow with it: 1 is what models have."""
    seed: int = 0
    parts: tuple[float, ...] = ()
    """Where each sequence's table is cut, as shares of its blocks."""

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scaling(self) -> float:
        return self.sharpness * float(self.head_dim**-0.5)


class World:
    """Pools that hold a case's keys and values in shuffled blocks; every slot of no sequence is NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        made = problem(
            case.rows,
            heads=(case.q_heads, case.kv_heads),
            dims=(case.head_dim, case.value_dim),
            block_tokens=case.block_tokens,
            seed=case.seed,
        )
        self.k, self.v, self.query = made.k_pool.to(case.dtype), made.v_pool.to(case.dtype), made.query
        self.made = dataclasses.replace(made, k_pool=self.k, v_pool=self.v)
        self.tables = [list(span.blocks) for span in made.spans]

    def packed(self, part: int = 0) -> PackedSpans:
        """The step over the `part`-th piece of every table."""
        case = self.case
        shares = (0.0, *case.parts, 1.0)
        tables, starts, ends = [], [], []
        for table, (first, count) in zip(self.tables, case.rows, strict=True):
            low, high = (round(share * len(table)) for share in shares[part : part + 2])
            tables.append(table[low:high])
            starts.append(low * case.block_tokens)
            ends.append(min(high * case.block_tokens, first + count))
        return PackedSpans(
            first_row=_starts([count for _, count in case.rows]),
            first_position=np.array([first for first, _ in case.rows], dtype=np.int32),
            table_start=_starts([len(table) for table in tables]),
            table_position=np.array(starts, dtype=np.int32),
            key_end=np.array(ends, dtype=np.int32),
            blocks=np.array([block for table in tables for block in table], dtype=np.int32),
            slots=np.zeros(0, dtype=np.int64),
        )

    def bounds(self) -> tuple[float, float]:
        return self.made.bounds(self.case.scaling, self.case.softcap, len(self.case.parts) + 1)

    def expected(self) -> Attended:
        return expected(self.made, self.case.scaling, self.case.softcap, self.case.window_tokens)


def _starts(lengths: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


cases = st.builds(
    Case,
    block_tokens=st.sampled_from([1, 3, 4, 8, 16, 24, 32, 64]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 40]),
    head_dim=st.sampled_from([5, 32, 64, 80, 96, 112, 128, 256]),
    value_dim=st.sampled_from([6, 16, 32, 40, 64, 80, 96, 112, 128, 256]),
    rows=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 5, 33, 70])), min_size=1, max_size=4
    ).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window_tokens=st.sampled_from([None, None, 1, 3, 16, 40, 1000]),
    softcap=st.sampled_from([None, None, 1.5, 50.0]),
    sharpness=st.sampled_from([0.2, 1.0, 2.0]),
    seed=st.integers(0, 99),
    parts=st.lists(st.floats(0, 1), max_size=3).map(lambda cuts: tuple(sorted(cuts))),
)


def attend(world: World, part: int = 0, threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    case, packed = world.case, world.packed(part)
    lse = torch.full(world.query.shape[:2], math.nan)
    pool, spans = library.describe_pool(world.k, world.v), library.describe_spans(packed, case.window_tokens)
    shape = paged.Shape(case.scaling, case.softcap)
    output = library.attend(library.load(), pool, spans, world.query, shape, threads, lse)
    return output, lse


def assert_close(actual: tuple[torch.Tensor, torch.Tensor], world: World) -> None:
    for mine, theirs, bound in zip(actual, world.expected(), world.bounds(), strict=True):
        assert_within(mine, theirs, bound)


@settings(max_examples=150)
@given(cases)
@example(Case(16, 2, 2, 64, 64, ((499, 1), (99, 1))))
@example(Case(16, 2, 1, 64, 64, ((0, 300),), window_tokens=100))
@example(Case(32, 1, 71, 64, 64, ((130, 3),), softcap=30.0))
def test_it_is_attention_over_what_each_row_sees(case: Case) -> None:
    """Slots of no sequence are NaN: one of them read, and the result would be, too."""
    world = World(dataclasses.replace(case, parts=()))
    assert_close(attend(world), world)


@settings(max_examples=100)
@given(cases)
@example(Case(32, 1, 3, 64, 64, ((600, 7),), window_tokens=300))
def test_a_row_gives_the_same_bits_in_a_span_of_its_own(case: Case) -> None:
    world = World(case)
    alone = copy.copy(world)
    rows = [(first + at, 1) for first, count in case.rows for at in range(count)]
    alone.case = dataclasses.replace(case, rows=tuple(rows))
    alone.tables = [
        table for table, (_, count) in zip(world.tables, case.rows, strict=True) for _ in range(count)
    ]
    for together, apart in zip(attend(world), attend(alone), strict=True):
        assert torch.equal(together, apart)


@settings(max_examples=100)
@given(cases)
def test_any_partition_of_the_blocks_merges_to_the_whole(case: Case) -> None:
    world = World(case)
    parts = [attend(world, part) for part in range(len(case.parts) + 1)]
    merged = paged.merge(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]))
    assert_close(merged, world)


@settings(max_examples=80)
@given(cases)
@example(Case(16, 2, 2, 64, 64, ((40, 1), (20, 70))))
def test_of_int8_it_is_attention_over_the_rounded_numbers(case: Case) -> None:
    """A 127th of the largest of a slot and head, halved; slots of no sequence are NaN by their scale."""
    world = World(dataclasses.replace(case, parts=(), dtype=torch.float32))
    sizes = [[*world.k.shape], [*world.v.shape]]
    sizes[0][2], sizes[1][3] = (paged.stored_dim(dim, torch.int8) for dim in (case.head_dim, case.value_dim))
    k, v = (torch.zeros(size, dtype=torch.int8) for size in sizes)
    keys, values = world.k.permute(0, 3, 1, 2).flatten(0, 1), world.v.transpose(1, 2).flatten(0, 1)
    pool, slots = library.describe_pool(k, v), torch.arange(len(keys))
    library.write(library.load(), pool, keys.contiguous(), values.contiguous(), slots)
    scales = k[:, :, -4:].contiguous().view(*k.shape[:2], -1).view(torch.float32)
    rounded = k[:, :, :-4] * scales[:, :, None], v[..., :-4] * v[..., -4:].contiguous().view(torch.float32)
    for mine, whole, dim in zip(rounded, (world.k, world.v), (2, 3), strict=True):
        step = whole.abs().amax(dim, keepdim=True) / 127
        assert bool(((mine - whole).abs() <= 0.501 * step)[whole.isfinite()].all())
        assert torch.equal(mine.isnan(), whole.isnan())
        whole.copy_(mine)
    shape, packed = paged.Shape(case.scaling, case.softcap), world.packed()
    spans = library.describe_spans(packed, case.window_tokens)
    lse = torch.full(world.query.shape[:2], math.nan)
    output = library.attend(library.load(), pool, spans, world.query, shape, 1, lse)
    for mine, theirs in zip((output, lse), attend(world), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@settings(max_examples=20)
@given(cases)
def test_threads_change_nothing(case: Case) -> None:
    world = World(dataclasses.replace(case, parts=()))
    one, two = attend(world), attend(world, threads=2)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_a_row_that_sees_nothing_gets_nothing() -> None:
    world = World(Case(4, 1, 2, 32, 32, ((9, 1), (3, 2)), parts=(1.0,)))
    output, lse = attend(world, part=1)
    assert torch.equal(output, torch.zeros_like(output)) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_a_number_stays_visible_in_its_own_row(where: str) -> None:
    world = World(Case(16, 2, 2, 64, 64, ((40, 1), (20, 1))))
    if where == "query":
        world.query[0] = math.nan
    else:
        pool = world.k if where == "key" else world.v
        pool[world.tables[0][1]] = math.nan
    output, _ = attend(world)
    assert bool(output[0].isnan().all()) and bool(output[1].isfinite().all())


def test_scores_of_any_size_are_survived() -> None:
    world = World(Case(16, 1, 1, 64, 64, ((63, 1),), sharpness=300.0))
    assert_close(attend(world), world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [3, 16])
def test_rows_are_written_as_torch_writes_them(dtype: torch.dtype, block_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    k, v = torch.zeros(5, 2, 32, block_tokens, dtype=dtype), torch.zeros(5, 2, block_tokens, 48, dtype=dtype)
    expected_k, expected_v = k.clone(), v.clone()
    joined = torch.randn(12, 2 * 32 + 2 * 48, generator=generator) * 100
    joined[3, 5], joined[4, 70] = math.nan, math.inf
    keys, values = joined[:, :64].view(12, 2, 32), joined[:, 64:].view(12, 2, 48)
    scattered = torch.randperm(5 * block_tokens, generator=generator)[:12]
    for slots in (scattered, torch.arange(2, 14)):  # Consecutive slots are written together.
        library.write(library.load(), library.describe_pool(k, v), keys, values, slots)
        paged.write(expected_k, expected_v, keys, values, slots)
    torch.testing.assert_close(k, expected_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v, expected_v, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block", [-1, 2])
def test_blocks_that_do_not_exist_are_refused(block: int) -> None:
    k, v = torch.zeros(2, 1, 32, 4), torch.zeros(2, 1, 4, 32)
    pool = library.describe_pool(k, v)
    world = World(Case(4, 1, 1, 32, 32, ((7, 1),)))
    packed = world.packed()
    packed.blocks[1] = block
    with pytest.raises(InternalError, match="does not exist"):
        library.attend(library.load(), pool, library.describe_spans(packed), world.query, paged.Shape(1.0))
    with pytest.raises(InternalError, match="does not exist"):
        library.write(
            library.load(), pool, torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), torch.tensor([block * 4])
        )


def test_heads_and_pools_that_do_not_fit_are_refused() -> None:
    world = World(Case(4, 2, 1, 32, 32, ((7, 1),)))
    pool, spans = library.describe_pool(world.k, world.v), library.describe_spans(packed := world.packed())
    with pytest.raises(InternalError, match="no multiple"):
        library.attend(library.load(), pool, spans, torch.zeros(1, 3, 32), paged.Shape(1.0))
    assert len(packed.blocks) == 2
    with pytest.raises(InternalError, match="no pools of one layer"):
        library.describe_pool(torch.zeros(2, 1, 32, 4), torch.zeros(2, 1, 8, 32))


def test_without_a_compiler_torch_computes_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    # nor a library that somebody else compiled
    monkeypatch.setattr(library, "build", lambda: build.build(tmp_path))
    library.load.cache_clear()
    library._load_or_warn.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert library.choose("auto", device=CPU, dtype=torch.float32) is None
        with pytest.raises(ConfigError, match="no C"):
            library.choose("native", device=CPU, dtype=torch.float32)
    finally:
        library.load.cache_clear()
        library._load_or_warn.cache_clear()
    assert [record.message for record in caplog.records if "plain torch" in record.message] == [
        caplog.records[0].message
    ]


def test_who_computes_where() -> None:
    assert library.choose("torch", device=CPU, dtype=torch.float32) is None
    assert library.choose("auto", device=torch.device("cuda"), dtype=torch.float32) is None
    assert library.choose("auto", device=CPU, dtype=torch.float16) is None
    with pytest.raises(ConfigError, match="set auto"):
        library.choose("native", device=CPU, dtype=torch.float16)


def test_tensors_lie_side_by_side_zero_and_outlive_the_arena() -> None:
    arena = Arena(100)
    first, second = arena.take(60), arena.take(40)
    with pytest.raises(ValueError, match="5 floats wanted of 0"):
        arena.take(5)
    assert second.data_ptr() - first.data_ptr() == 60 * 4
    assert first.data_ptr() % 64 == 0
    first.fill_(1.0)
    del arena
    assert torch.equal(second, torch.zeros(40)) and first.sum() == 60


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="not Linux")
def test_an_arena_asks_for_large_pages_and_is_of_a_kind_that_has_them() -> None:
    """Private: of shared memory the system has none, unless it is set to."""
    taken = Arena(1 << 20).take(1 << 20)
    at, mine = taken.data_ptr(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            first, end = int(found[1], 16), int(found[2], 16)
            mine = found[3] if first <= at < end else ""
        elif mine and line.startswith("VmFlags:"):
            assert mine.endswith("p") and "hg" in line.split()
            return
    raise AssertionError("the arena is nowhere")
