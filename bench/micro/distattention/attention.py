"""One layer's attention with its keys at other workers: exactness, speed, and choice of mode.

The undivided side is the same operator with all keys in the debtor's pools. Sides take turns; times are
medians of the wall clock. Query shipping computes at the creditor; fetching copies the keys first.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from bench.kit.stats import alternate, ratio_of
from bench.micro.distattention.creditor import GRANT, Settings, fill, lenders, make_attention
from services.worker.engine.attention import PagedAttention
from services.worker.engine.paged import Shape
from services.worker.engine.spans import Span
from services.worker.peers.attention.core.cost import CreditorSpeeds, ShipMode, Work, choose_mode
from services.worker.peers.attention.debtor import AttendingDebtor
from services.worker.peers.transport.link import PeerLink

BLOCK_TOKENS = 16
LAYER = (8, 128, 128)
Q_HEADS = 32
"""A layer of Llama-3-8B."""
_SEED = 11
_STAGING_BLOCKS = 64
_MOST_PAIRS = 1 << 20
"""Limit on rows times keys: larger cells take seconds and add nothing."""


class Chosen:
    """A chooser with a fixed mode, or with the measured costs."""

    def __init__(self) -> None:
        self.mode: ShipMode | None = ShipMode.SHIP
        self.last = ShipMode.SHIP

    def __call__(self, work: Work, speeds: CreditorSpeeds) -> ShipMode:
        self.last = self.mode or choose_mode(work, speeds)
        return self.last


@dataclass(frozen=True)
class Queries:
    """Queries of one step."""

    spans: tuple[Span, ...]
    decodes: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_queries(rows: list[tuple[int, int, list[int]]], generator: torch.Generator) -> Queries:
    """Return random queries for rows of (first position, count, blocks)."""
    spans = tuple(Span(first, count, blocks) for first, count, blocks in rows)
    total = sum(count for _, count, _ in rows)
    kv_heads, dim, _ = LAYER
    return Queries(
        spans,
        sum(span.count == 1 for span in spans),
        torch.randn(total, Q_HEADS, dim, generator=generator),
        torch.randn(total, kv_heads, dim, generator=generator),
        torch.randn(total, kv_heads, dim, generator=generator),
    )


def attend(attention: PagedAttention, queries: Queries) -> torch.Tensor:
    """Run one layer's attention for one step."""
    attention.begin(queries.spans, queries.decodes)
    shape = Shape(LAYER[1] ** -0.5)
    output = attention.attend(0, queries.query, queries.key, queries.value, shape)
    attention.end()
    return output


def settings(creditors: int, blocks: int, core: int) -> list[Settings]:
    return [
        Settings(
            name=f"creditor-{index}",
            layers=(LAYER,),
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            seed=_SEED + index,
            core=core,
        )
        for index in range(creditors)
    ]


@dataclass
class Sides:
    """Undivided attention, and attention with blocks at creditors, over the same keys."""

    whole: PagedAttention
    divided: PagedAttention
    debtor: AttendingDebtor
    chosen: Chosen

    def error(self, queries: Queries) -> float:
        """Return the largest absolute difference between the two."""
        return float((attend(self.divided, queries) - attend(self.whole, queries)).abs().max())


def make_sides(links: list[PeerLink], blocks: int, own_blocks: int) -> Sides:
    """Return both sides. Ids below `own_blocks` are the debtor's; then follow `blocks` of each creditor."""
    whole = make_attention((LAYER,), own_blocks + len(links) * blocks, BLOCK_TOKENS)
    divided = make_attention((LAYER,), own_blocks, BLOCK_TOKENS)
    for attention in (whole, divided):
        fill(attention, 0, own_blocks, _SEED - 1)
    chosen = Chosen()
    debtor = AttendingDebtor(
        divided,
        q_heads=Q_HEADS,
        own_blocks=own_blocks,
        block_tokens=BLOCK_TOKENS,
        staging_blocks=_STAGING_BLOCKS,
        deadline_s=30.0,
        choose=chosen,
    )
    for index, link in enumerate(links):
        first = own_blocks + index * blocks
        fill(whole, first, first + blocks, _SEED + index)
        debtor.homes.place(range(first, first + blocks), debtor.add(link, [GRANT]), range(blocks))
    return Sides(whole, divided, debtor, chosen)


def measure_error(core: int, cases: int, creditors: int = 3) -> float:
    """Return the largest error over random partitions of random steps, with decodes, chunks and both
    modes."""
    generator = torch.Generator().manual_seed(_SEED)
    worst, blocks = 0.0, 48
    with lenders(settings(creditors, blocks, core)) as links:
        sides = make_sides(links, blocks, blocks)
        for case in range(cases):
            sides.chosen.mode = (ShipMode.SHIP, ShipMode.FETCH)[case % 2]
            order = torch.randperm((creditors + 1) * blocks, generator=generator).tolist()
            rows = []
            for length, count in ((700, 1), (333, 1), (511, 40), (5, 1), (300, 129)):
                needed = -(-length // BLOCK_TOKENS)
                rows.append((length - count, count, [order.pop() for _ in range(needed)]))
            worst = max(worst, sides.error(make_queries(rows, generator)))
        sides.debtor.close()
    return worst


@dataclass(frozen=True)
class LayerTimes:
    """One batch and context with all keys at the creditor; seconds."""

    rows: int
    context_tokens: int
    whole_s: float
    ship_s: float
    fetch_s: float
    overhead: float
    """Median ratio of shipped to undivided, less 1."""
    half_ratio: float
    """Ratio with half of the keys remote to undivided."""
    fetch_ratio: float
    """Ratio of fetched to shipped."""
    chosen: ShipMode
    """Mode that the measured costs choose."""

    @property
    def overhead_us(self) -> float:
        """Extra time of a layer with remote keys."""
        return (self.ship_s - self.whole_s) * 1e6


def measure_cells(
    core: int, contexts: list[int], chunks: list[int], turns: int, advance: Callable[[], None]
) -> list[LayerTimes]:
    """Measure every context and chunk; chunks of 1 are decodes."""
    chosen = [(tokens, count) for tokens, count in product(contexts, chunks) if tokens * count <= _MOST_PAIRS]
    most = max(-(-(tokens + count) // BLOCK_TOKENS) for tokens, count in chosen)
    cells = []
    with lenders(settings(1, most, core)) as links:
        sides = make_sides(links, most, most)
        for tokens, count in chosen:
            cells.append(_measure(sides, most, tokens, count, turns))
            advance()
        sides.debtor.close()
    return cells


def _measure(sides: Sides, most: int, tokens: int, count: int, turns: int) -> LayerTimes:
    generator = torch.Generator().manual_seed(tokens + count)
    needed = -(-(tokens + count) // BLOCK_TOKENS)
    there = make_queries([(tokens, count, list(range(most, most + needed)))], generator)
    mixed = [most + index if index % 2 else index for index in range(needed)]
    half = make_queries([(tokens, count, mixed)], generator)
    sides_of = (
        partial(_timed, sides, sides.whole, there, ShipMode.SHIP),
        partial(_timed, sides, sides.divided, there, ShipMode.SHIP),
        partial(_timed, sides, sides.divided, half, ShipMode.SHIP),
        partial(_timed, sides, sides.divided, there, ShipMode.FETCH),
    )
    for side in sides_of:
        side()
    whole, ship, split, fetch = alternate(sides_of, turns)
    sides.chosen.mode = None
    attend(sides.divided, there)
    return LayerTimes(
        rows=count,
        context_tokens=tokens,
        whole_s=statistics.median(whole),
        ship_s=statistics.median(ship),
        fetch_s=statistics.median(fetch),
        overhead=ratio_of(ship, whole).median - 1,
        half_ratio=ratio_of(split, whole).median,
        fetch_ratio=ratio_of(fetch, ship).median,
        chosen=sides.chosen.last,
    )


def _timed(sides: Sides, attention: PagedAttention, queries: Queries, mode: ShipMode) -> float:
    sides.chosen.mode = mode
    began_s = time.perf_counter()
    attend(attention, queries)
    return time.perf_counter() - began_s
