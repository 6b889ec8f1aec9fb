"""A part survives the wire, and an inconsistent part is refused before any use."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import PackedSpans, Span, pack
from services.worker.peers.attention.messages import (
    Attended,
    GrantRef,
    PartWire,
    Request,
    from_wire,
    read_answer,
    read_request,
    request_encoder,
    to_wire,
)
from shared.errors import InvalidMessage


def part() -> PackedSpans:
    """Two sequences at creditor 1: a decode and a chunk that begins in the middle of a block."""
    homes = Homes(4)
    homes.place(range(4, 12), 1, range(8))
    spans = [Span(9, 1, [0, 4, 5]), Span(6, 7, [6, 7, 1, 8])]
    return split(pack(spans, 4), homes, 4)[1].spans


def wire(**changes: Any) -> PartWire:
    spans = part()
    arrays: dict[str, Any] = {
        name: np.array(value, dtype=getattr(spans, name).dtype) for name, value in changes.items()
    }
    return to_wire(replace(spans, **arrays))


@pytest.mark.parametrize("window_tokens", [0, 5])
def test_a_part_survives_the_round_trip(window_tokens: int) -> None:
    spans = replace(part(), window_tokens=window_tokens)
    found = from_wire(to_wire(spans), 4)
    for name in ("first_row", "first_position", "table_start", "key_end", "blocks", "slots"):
        assert np.array_equal(getattr(found.spans, name), getattr(spans, name))
    assert found.rows == len(spans.slots) and found.spans.window_tokens == window_tokens
    assert np.array_equal(found.kept_slots, spans.slots[spans.slots >= 0])


@pytest.mark.parametrize(
    "changes",
    [
        {"key_end": [10**6] * 4},
        {"key_end": [-1] * 4},
        {"table_start": [10**6] * 4},
        {"table_start": [-5] * 4},
        {"first_row": [0, 5, 3, 4, 6]},
        {"first_row": [1, 2]},
        {"first_position": [-3] * 4},
        {"blocks": []},
        {"slots": [4 * 99] * 8},
        {"slots": []},
        {"first_position": []},
    ],
)
def test_indices_out_of_range_are_refused(changes: dict[str, list[int]]) -> None:
    with pytest.raises(InvalidMessage):
        from_wire(wire(**changes), 4)


@pytest.mark.parametrize("window_tokens", [-1, 1 << 31])
def test_an_invalid_window_is_refused(window_tokens: int) -> None:
    with pytest.raises(InvalidMessage):
        from_wire(to_wire(replace(part(), window_tokens=window_tokens)), 4)


def test_arrays_of_odd_length_are_refused() -> None:
    good = to_wire(part())
    with pytest.raises(InvalidMessage, match="odd length"):
        from_wire(PartWire(**{**{f: getattr(good, f) for f in good.__struct_fields__}, "blocks": b"abc"}), 4)


def test_invalid_headers_are_refused() -> None:
    with pytest.raises(InvalidMessage):
        read_request(b"\xff\x00")
    with pytest.raises(InvalidMessage):
        read_answer(b"nonsense")
    request = Request(step=1, layer=0, grants=(GrantRef(1, 2),), softcap=30.0)
    assert read_request(request_encoder.encode(request)) == request


@pytest.mark.parametrize("compute_s", [float("nan"), float("inf"), -1.0])
def test_an_invalid_compute_time_is_refused(compute_s: float) -> None:
    """It corrupted the creditor's measured speed forever."""
    with pytest.raises(InvalidMessage):
        read_answer(msgspec.msgpack.encode(Attended(compute_s=compute_s)))
