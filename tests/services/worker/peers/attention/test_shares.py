"""Messages of a step: one per creditor and layer for the whole batch, described once."""

from typing import Any

import pytest

from services.worker.engine.contract import Row
from services.worker.engine.native.library import AttentionMode
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.messages import ATTEND, FETCH, NATIVE, WRITE, read_request
from services.worker.peers.transport.base import Call, PeerLink
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.peers.attention.rig import always, connect, lender, make_engine

LAYERS = 2


class Noted:
    """Records the requests over a link."""

    def __init__(self, link: PeerLink, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        self.described: list[bool] = []
        begin = link.begin

        def note(kind: str, header: bytes = b"", *given: Any, **how: Any) -> Call:
            self.kinds.append(kind)
            self.described.append(read_request(header).part is not None)
            return begin(kind, header, *given, **how)

        monkeypatch.setattr(link, "begin", note)


def rows(counts: list[tuple[int, int]]) -> list[Row]:
    """Return a batch of (first position, count), each in five of the lender's blocks."""
    return [
        Row([7 % VOCABULARY] * count, first, list(range(4 + 5 * at, 9 + 5 * at)), None)
        for at, (first, count) in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("mode", "attention", "first", "later"),
    [
        (ShipMode.SHIP, "native", [NATIVE], []),
        (ShipMode.SHIP, "torch", [ATTEND] * LAYERS, [ATTEND] * LAYERS),
        (ShipMode.FETCH, "native", [WRITE] * LAYERS, [FETCH] * LAYERS + [WRITE]),
    ],
)
def test_a_batch_takes_one_message_per_layer(
    mode: ShipMode,
    attention: AttentionMode,
    first: list[str],
    later: list[str],
    llama: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lender(llama, 20) as owner:
        engine = make_engine(llama, 4, attention)
        link = owner.dial()
        noted = Noted(link, monkeypatch)
        debtor = connect(engine, [link], 20, choose=always(mode), staging_blocks=20)
        engine.step(rows([(0, 9), (0, 17), (0, 5)]))
        assert noted.kinds == first
        assert noted.described == [first != [NATIVE]] + [False] * (len(first) - 1)
        noted.kinds.clear()
        engine.step(rows([(9, 1), (17, 1), (5, 1)]))
        assert noted.kinds == later
        debtor.close()


def test_a_long_context_is_fetched_in_segments_that_fit_the_staging(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lender(llama, 5) as owner:
        engine = make_engine(llama, 4)
        link = owner.dial()
        noted = Noted(link, monkeypatch)
        debtor = connect(engine, [link], 5, choose=always(ShipMode.FETCH), staging_blocks=2)
        engine.step(rows([(0, 17)]))
        noted.kinds.clear()
        engine.step(rows([(17, 1)]))
        assert noted.kinds == [FETCH, FETCH, FETCH] * LAYERS + [WRITE]
        debtor.close()
