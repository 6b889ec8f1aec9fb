"""Bytes that are well-formed or once were not handled well, and what becomes of them when they are damaged.

`corpus/TARGET/NAME` are the files. `python -m tests.fuzz.damage` writes those that are made here; whatever a
fuzzer finds is put beside them by hand, under a name that says what it is.
"""

import struct
import zlib
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from services.worker.kv.tiers.disk import Geometry, SlotHeader, pack_file, pack_slot
from services.worker.peers.transport import wire
from shared.errors import Overloaded, to_wire
from shared.messages.base import encode
from shared.messages.commands import SubmitSequence
from shared.messages.reports import SequenceState
from shared.messages.tokens import TokenDelta, TokenFrame
from tests.shared.messages.builders import cancelling, ref, sequence_report, spec, worker_report

FOLDER = Path(__file__).with_name("corpus")


@cache
def entries(target: str) -> tuple[bytes, ...]:
    """All that there are of a target, in an order that does not change."""
    return tuple(path.read_bytes() for path in sorted((FOLDER / target).iterdir()))


def damaged(target: str) -> st.SearchStrategy[bytes]:
    """An entry with a few changes; or bytes that nobody has seen."""
    known = st.sampled_from(entries(target))
    changed = st.tuples(known, st.lists(_changes(target), min_size=1, max_size=6)).map(_applied)
    return known | changed | st.binary(max_size=200)


_INTERESTING = (b"\x00", b"\x7f", b"\x80", b"\xc1", b"\xff", b"\n\n", b"data: ", b"\xdf\xff\xff\xff\xff")
_Change = tuple[str, int, int, bytes]


def _changes(target: str) -> st.SearchStrategy[_Change]:
    others = st.sampled_from(entries(target) + _INTERESTING) | st.binary(min_size=1, max_size=8)
    kinds = st.sampled_from(("flip", "cut", "insert", "replace", "double"))
    return st.tuples(kinds, st.integers(0, 1 << 16), st.integers(1, 255), others)


def _applied(case: tuple[bytes, list[_Change]]) -> bytes:
    data, changes = case
    for kind, place, amount, other in changes:
        at = place % (len(data) + 1)
        match kind:
            case "flip" if at < len(data):
                data = data[:at] + bytes([data[at] ^ amount]) + data[at + 1 :]
            case "cut":
                data = data[:at] + data[at + amount :]
            case "insert":
                data = data[:at] + other + data[at:]
            case "replace":
                data = data[:at] + other + data[at + len(other) :]
            case "double":
                data = data[:at] + data[at : at + amount] + data[at:]
    return data[: 1 << 16]


def made() -> dict[str, dict[str, bytes]]:
    """By target and name."""
    report = worker_report(
        sequences=(sequence_report(ref("r"), SequenceState.DECODING),), link_bytes_per_s={"worker-1": 1e9}
    )
    hello = wire.Hello("worker-0", 1, "worker-1", 2, bytes(16), bytes(16))
    request = wire.Envelope(wire.REQUEST, 1, b"header", "kind", (1, 2, 300), 100)
    geometry = Geometry(b"fingerprint 0001", 10_000, 4)
    slot = SlotHeader(bytes(range(16)), bytes(16), 3, 10_000, 1 << 60)
    first = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
    name = b"response.output_text.delta"
    delta = b"event: " + name + b'\ndata: {"type":"' + name + b'","sequence_number":12}\n\n'
    return {
        "messages": {
            "submit": encode(SubmitSequence(spec=spec(ref("r", 2), [1, 2, 3], generated=[4], max_tokens=9))),
            "report": encode(report),
            "cancel": encode(cancelling(ref("r"))),
            "frame": encode(TokenFrame("worker-0", 9, (TokenDelta("r", 0, 1, 5, (7, 8)),))),
            "deep": b"\x91" * 5000,
            "long_map": b"\xdf\xff\xff\xff\xff",
            "not_text": b"\x81\xa2\xff\xfe\x01",
        },
        "bulk": {
            "request": wire.packed(request),
            "hello": wire.packed(wire.Envelope(wire.HELLO, 0, wire.to_bytes(hello))),
            "refusal": wire.packed(
                wire.Envelope(wire.REFUSAL, 1, wire.to_bytes(to_wire(Overloaded("later", retry_after_s=2.0))))
            ),
            "many_buffers": wire.packed(wire.Envelope(wire.REQUEST, 2, b"", "kind", (0,) * 40)),
            "long": struct.pack("<4sIII", b"KVB2", 0xFFFFFFFF, 0, 0),
            "no_array": struct.pack("<4sIII", b"KVB2", 1, zlib.crc32(b"\x80"), 0) + b"\x80",
        },
        "disk": {
            "slot": pack_slot(slot),
            "first": pack_slot(SlotHeader(bytes(range(16)), b"", 0, 10_000, 7)),
            "short": pack_slot(SlotHeader(bytes(range(16)), b"", 0, 500, 7)),
            "table": pack_slot(slot) * 2 + bytes(64) + pack_slot(slot),
            "file": pack_file(geometry),
        },
        "sse": {
            "response": first + delta,
            "done": b'data: {"choices":[]}\n\ndata: [DONE]\n\n',
            "comment": b": keep-alive\n\n" + delta,
            "number": b'event: x\ndata: {"type":"x","sequence_number":99999999999999999999999999}\n\n',
            "crlf": delta.replace(b"\n", b"\r\n"),
        },
    }


def main() -> None:
    """Writes them."""
    for target, files in made().items():
        (FOLDER / target).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (FOLDER / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
