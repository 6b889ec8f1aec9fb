"""What a debtor's engine says to a creditor about a step: headers of bulk messages, and their checks.

Kinds: `kv.attend` brings queries, and the new keys and values that the creditor keeps, and takes outputs and
log-sum-exps back; `kv.native` announces that steps go over the link natively from now on, where the creditor
agrees (`engine/native/exchange.h`); `kv.write` brings keys and values only; `kv.fetch` takes blocks back, and
may bring keys and values of another layer: a link carries one large call at a time. The description of a
step's part travels once, with its first message; later ones name it by number. Knows neither tensors nor
links.
Source: Infinite-LLM §4.6 (papers/001).
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.engine.partition import ELSEWHERE
from services.worker.engine.spans import PackedSpans
from shared.errors import InvalidMessage
from shared.messages.base import decode
from shared.messages.lending import KvTier

ATTEND, NATIVE, WRITE, FETCH = "kv.attend", "kv.native", "kv.write", "kv.fetch"
MAX_ROWS = 1 << 16
"""Of one part."""


class GrantRef(msgspec.Struct, frozen=True, array_like=True):
    """Blocks lent; a later generation of the same grant refuses what names an earlier one."""

    grant_id: int
    generation: int


NO_STEP = 0


class PartWire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `Part` as it travels: little-endian arrays, int32 but for `slots` (int64)."""

    first_row: bytes
    first_position: bytes
    table_start: bytes
    key_end: bytes
    blocks: bytes
    slots: bytes
    window_tokens: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The header of all of them."""

    step: int
    """Number of the step, rising within one debtor's incarnation; `NO_STEP`: of this message alone, its part
    is not remembered."""
    layer: int
    grants: tuple[GrantRef, ...]
    tier: KvTier = KvTier.DEVICE
    """Of the creditor's memory: the part's blocks, and the grants', are all of that one."""
    part: PartWire | None = None
    q_heads: int = 0
    scaling: float = 1.0
    softcap: float | None = None
    indices: bytes = b""
    """Of a fetch, int32: which of the part's blocks."""
    write_layer: int = -1
    """Of a fetch that brings keys and values along: theirs."""


class Attended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to `kv.attend` and `kv.native`."""

    compute_s: float = 0.0
    over_budget: bool = False
    """The creditor lends no more of its time now. Keys and values were written; fetch the blocks instead."""
    is_native: bool = False
    """Of a `kv.native`: steps may follow on the link. Else ask by `kv.attend`."""


@dataclass(frozen=True, slots=True)
class Described:
    """A part that was checked: every index in it is inside what it refers to."""

    spans: PackedSpans
    kept: npt.NDArray[np.int64]
    """Rows whose K and V the creditor keeps, `[w]`, and their slots, `[w]`."""
    kept_slots: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        return int(self.spans.first_row[-1])


request_encoder = msgspec.msgpack.Encoder()


def to_wire(spans: PackedSpans) -> PartWire:
    return PartWire(
        first_row=spans.first_row.tobytes(),
        first_position=spans.first_position.tobytes(),
        table_start=spans.table_start.tobytes(),
        key_end=spans.key_end.tobytes(),
        blocks=spans.blocks.tobytes(),
        slots=spans.slots.tobytes(),
        window_tokens=spans.window_tokens,
    )


def from_wire(wire: PartWire, block_tokens: int) -> Described:
    """Raises InvalidMessage for a part that does not hold together."""
    try:
        first_row, position, start, key_end, blocks = (
            np.frombuffer(each, dtype=np.int32)
            for each in (wire.first_row, wire.first_position, wire.table_start, wire.key_end, wire.blocks)
        )
        slots = np.frombuffer(wire.slots, dtype=np.int64)
    except ValueError as error:
        raise InvalidMessage(f"arrays of odd length: {error}") from error
    count = len(position)
    sound = len(first_row) == count + 1 and len(start) == count and len(key_end) == count and count > 0
    sound = sound and first_row[0] == 0 and bool((np.diff(first_row) >= 0).all())
    sound = sound and len(slots) == first_row[-1] and 0 < len(slots) <= MAX_ROWS
    sound = (
        sound
        and 0 <= wire.window_tokens < 1 << 31
        and bool((position >= 0).all() and (start >= 0).all() and (key_end >= 0).all())
    )
    sound = sound and bool((start.astype(np.int64) - (-key_end // block_tokens) <= len(blocks)).all())
    if not sound:
        raise InvalidMessage("a part whose arrays do not fit together")
    kept = np.flatnonzero(slots != ELSEWHERE)
    kept_slots = slots[kept]
    if not np.isin(kept_slots // block_tokens, blocks).all():
        raise InvalidMessage("slots outside the part's blocks")
    table = blocks.copy()  # torch wants memory that it could write to
    at = np.zeros_like(position)
    spans = PackedSpans(first_row, position, start, at, key_end, table, slots, wire.window_tokens)
    return Described(spans, kept, kept_slots)


def read_request(header: bytes) -> Request:
    """Raises InvalidMessage."""
    return decode(header, Request)


def read_answer(header: bytes) -> Attended:
    """Raises InvalidMessage."""
    answer = decode(header, Attended)
    if not 0 <= answer.compute_s < float("inf"):
        raise InvalidMessage(f"computed for {answer.compute_s} s")
    return answer
