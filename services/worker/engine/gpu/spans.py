"""Device arrays that describe a step's spans and their tiles for the kernels, uploaded in one copy.

The arrays are those of `Spans` in `services/worker/engine/native/attention.h`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.paged import to_device
from services.worker.engine.spans import PackedSpans

DECODE_ROWS = 16
"""Rows of a decode tile: the minimum for tensor cores."""
PREFILL_ROWS = 64
MOST_TILE_KEYS = 128
"""Most keys of a tile."""
ALL_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_MIN_SPLIT_TOKENS = 128
_PROGRAMS_PER_MULTIPROCESSOR = 4
TABLE_END = np.zeros(MOST_TILE_KEYS, np.int32)
"""Valid block ids behind the last table, because kernels read a table's last tile as a whole."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one kernel launch, all of one shape."""

    span: torch.Tensor
    """int32 `[tiles]`: span index of each tile."""
    row: torch.Tensor
    """int32 `[tiles]`: packed row of each tile's first token."""
    tokens: int
    """Most tokens of a tile."""
    rows: int
    """Number of (token, query head) pairs of a tile, a power of two."""
    splits: int
    """Number of parts that a tile's keys are split into; 1: no merge."""


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """A step's spans as int32 device arrays; see attention.h."""

    first_row: torch.Tensor
    first_position: torch.Tensor
    table_start: torch.Tensor
    table_position: torch.Tensor
    key_end: torch.Tensor
    blocks: torch.Tensor
    tiles: tuple[Tiles, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts of the layers that tiles are made for."""

    group: int
    """Number of query heads per KV head."""
    kv_heads: int


def pack(packed: PackedSpans, heads: Heads, *, device: torch.device, multiprocessors: int) -> DeviceSpans:
    """Return the spans and their tiles on the device."""
    rows = packed.first_row.tolist()
    longest = int(np.max(packed.key_end - packed.table_position, initial=0))
    single = [index for index, (start, end) in enumerate(pairwise(rows)) if end - start == 1]
    chunks = [index for index, (start, end) in enumerate(pairwise(rows)) if end - start != 1]
    divisions = [
        _divide(rows, chosen, tile_rows, heads, longest, multiprocessors)
        for chosen, tile_rows in ((single, DECODE_ROWS), (chunks, PREFILL_ROWS))
        if chosen
    ]
    parts: list[npt.ArrayLike] = [packed.first_row, packed.first_position]
    parts += [packed.table_start[: len(rows) - 1], packed.table_position, packed.key_end]
    for span, row, _ in divisions:
        parts += [span, row]
    views = upload([*parts, packed.blocks], device)
    tiles = [
        Tiles(views[5 + 2 * at], views[6 + 2 * at], *shape) for at, (_, _, shape) in enumerate(divisions)
    ]
    first_row, first_position, table_start, table_position, key_end = views[:5]
    arrays = first_row, first_position, table_start, table_position, key_end, views[-1]
    return DeviceSpans(*arrays, tuple(tiles))


def upload(parts: Sequence[npt.ArrayLike], device: torch.device) -> list[torch.Tensor]:
    """Return int32 device arrays of several arrays or lists, in one copy; `TABLE_END` follows the last."""
    arrays = [np.asarray(part, dtype=np.int32) for part in parts]
    on_device = to_device(torch.from_numpy(np.concatenate([*arrays, TABLE_END])), device)
    starts = [0, *accumulate(each.size for each in arrays)]
    return [on_device[start:end] for start, end in pairwise(starts)]


def tile_shape(tile_rows: int, group: int) -> tuple[int, int]:
    """Return the rows (a power of two, at least one token's heads) and the tokens of a tile."""
    rows = max(tile_rows, 1 << (group - 1).bit_length())
    return rows, rows // group


def choose_splits(tiles: int, kv_heads: int, longest_tokens: int, multiprocessors: int) -> int:
    """Return the number of key splits, one of `ALL_SPLITS`, that fills the device without too short parts."""
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(1, tiles * kv_heads)
    most = min(wanted, -(-longest_tokens // _MIN_SPLIT_TOKENS), ALL_SPLITS[-1])
    return 1 << (max(1, most).bit_length() - 1)


def _divide(
    first_rows: Sequence[int],
    chosen: Sequence[int],
    tile_rows: int,
    heads: Heads,
    longest_tokens: int,
    multiprocessors: int,
) -> tuple[list[int], list[int], tuple[int, int, int]]:
    """Return span and first row of each tile of the chosen spans, and tokens, rows and splits of all."""
    rows, tokens = tile_shape(tile_rows, heads.group)
    of_span: list[int] = []
    first: list[int] = []
    for index in chosen:
        starts = range(first_rows[index], first_rows[index + 1], tokens)
        of_span += [index] * len(starts)
        first += starts
    splits = choose_splits(len(first), heads.kv_heads, longest_tokens, multiprocessors)
    return of_span, first, (tokens, rows, splits)
