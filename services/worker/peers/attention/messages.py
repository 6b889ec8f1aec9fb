"""Messages of a debtor's engine to a creditor about a step: headers of bulk messages, and their checks.

    kv.attend   brings queries, and keys and values to keep; returns outputs and log-sum-exps
    kv.native   announces native steps on the link, if the creditor agrees (`engine/native/exchange.h`)
    kv.write    brings keys and values only
    kv.fetch    returns blocks, and may bring keys and values of another layer

The first message of a step describes its part; later ones name it by number. Knows neither tensors nor links.
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
"""Most rows of a part."""


class GrantRef(msgspec.Struct, frozen=True, array_like=True):
    """Reference to a grant, at the generation that the debtor knows."""

    grant_id: int
    generation: int


NO_STEP = 0


class PartWire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `Part` on the wire: little-endian arrays of int32, but int64 for `slots`."""

    first_row: bytes
    first_position: bytes
    table_start: bytes
    key_end: bytes
    blocks: bytes
    slots: bytes
    window_tokens: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Header of all kinds."""

    step: int
    """Number of the step, rising within a debtor's incarnation. `NO_STEP`: the part is not remembered."""
    layer: int
    grants: tuple[GrantRef, ...]
    tier: KvTier = KvTier.DEVICE
    """Tier of the creditor's memory that all blocks and grants belong to."""
    part: PartWire | None = None
    q_heads: int = 0
    scaling: float = 1.0
    softcap: float | None = None
    indices: bytes = b""
    """Indices of a fetch into the part's blocks, int32."""
    write_layer: int = -1
    """Layer of the keys and values that a fetch brings."""


class Attended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to `kv.attend` and `kv.native`."""

    compute_s: float = 0.0
    over_budget: bool = False
    """The creditor's time budget is used up. Keys and values were written; fetch the blocks instead."""
    is_native: bool = False
    """Whether steps may follow on the link as `kv.native`. Else use `kv.attend`."""


@dataclass(frozen=True, slots=True)
class Described:
    """A checked part: all of its indices are in range."""

    spans: PackedSpans
    kept: npt.NDArray[np.int64]
    """Rows `[w]` whose keys and values the creditor keeps; `kept_slots` `[w]` are their slots."""
    kept_slots: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        return int(self.spans.first_row[-1])


request_encoder = msgspec.msgpack.Encoder()


_ARRAYS = ("first_row", "first_position", "table_start", "key_end", "blocks", "slots")


def to_wire(spans: PackedSpans) -> PartWire:
    arrays = {name: getattr(spans, name).tobytes() for name in _ARRAYS}
    return PartWire(**arrays, window_tokens=spans.window_tokens)


def from_wire(wire: PartWire, block_tokens: int) -> Described:
    """Decode and check a part. Raises InvalidMessage."""
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
        raise InvalidMessage("the arrays of a part do not fit together")
    kept = np.flatnonzero(slots != ELSEWHERE)
    kept_slots = slots[kept]
    if not np.isin(kept_slots // block_tokens, blocks).all():
        raise InvalidMessage("slots outside the part's blocks")
    table = blocks.copy()  # torch needs writable memory.
    at = np.zeros_like(position)
    spans = PackedSpans(first_row, position, start, at, key_end, table, slots, wire.window_tokens)
    return Described(spans, kept, kept_slots)


def read_answer(header: bytes) -> Attended:
    """Decode an answer. Raises InvalidMessage."""
    answer = decode(header, Attended)
    if not 0 <= answer.compute_s < float("inf"):
        raise InvalidMessage(f"a compute time of {answer.compute_s} s")
    return answer
