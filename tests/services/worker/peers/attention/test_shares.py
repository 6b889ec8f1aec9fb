"""What a step costs in messages: one per creditor and layer for the whole batch, described once."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.worker.engine.engine import Row
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.messages import ATTEND, FETCH, WRITE, read_request
from services.worker.peers.transport.base import Buffer, Call, Peer, PeerLink
from tests.services.worker.conftest import VOCABULARY, ModelFactory
from tests.services.worker.peers.attention.rig import always, connect, lender, make_engine

LAYERS = 2


class Noting:
    """A link that remembers what was asked over it."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self.kinds: list[str] = []
        self.described: list[bool] = []

    @property
    def peer(self) -> Peer:
        return self._link.peer

    @property
    def transport(self) -> str:
        return self._link.transport

    @property
    def closed(self) -> bool:
        return self._link.closed

    def begin(self, kind: str, header: bytes = b"", buffers: Sequence[Buffer] = (), **how: Any) -> Call:
        self.kinds.append(kind)
        self.described.append(read_request(header).part is not None)
        return self._link.begin(kind, header, buffers, **how)

    def ask(self, kind: str, header: bytes = b"", buffers: Sequence[Buffer] = (), **how: Any) -> Any:
        return self.begin(kind, header, buffers, **how).finish()

    def close(self) -> None:
        self._link.close()


def rows(counts: list[tuple[int, int]]) -> list[Row]:
    """(first position, count) each in five blocks of the lender's."""
    return [
        Row([7 % VOCABULARY] * count, first, list(range(4 + 5 * at, 9 + 5 * at)), None)
        for at, (first, count) in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("mode", "first", "later"),
    [
        (ShipMode.SHIP, [ATTEND] * LAYERS, [ATTEND] * LAYERS),
        (ShipMode.FETCH, [WRITE] * LAYERS, [FETCH] * LAYERS + [WRITE]),
    ],
)
def test_one_message_a_layer_for_the_batch(
    mode: ShipMode, first: list[str], later: list[str], make_model: ModelFactory
) -> None:
    model = make_model("llama")
    with lender(model, 20) as owner:
        engine = make_engine(model, 4)
        link = Noting(owner.dial())
        debtor = connect(engine, [link], 20, choose=always(mode), staging_blocks=20)
        engine.step(rows([(0, 9), (0, 17), (0, 5)]))
        assert link.kinds == first
        assert link.described == [True] + [False] * (len(first) - 1)
        link.kinds.clear()
        engine.step(rows([(9, 1), (17, 1), (5, 1)]))
        assert link.kinds == later
        debtor.close()


def test_a_long_context_comes_in_segments_that_the_staging_holds(make_model: ModelFactory) -> None:
    model = make_model("llama")
    with lender(model, 5) as owner:
        engine = make_engine(model, 4)
        link = Noting(owner.dial())
        debtor = connect(engine, [link], 5, choose=always(ShipMode.FETCH), staging_blocks=2)
        engine.step(rows([(0, 17)]))
        link.kinds.clear()
        engine.step(rows([(17, 1)]))
        assert link.kinds == [FETCH, FETCH, FETCH] * LAYERS + [WRITE]
        debtor.close()
