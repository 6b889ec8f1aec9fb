"""A ticket works once, in time, for its peer; receivers are found by kind."""

import pytest

from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.wire import ticket_name
from shared.errors import InvalidRequest, Overloaded, Unauthorized

OWN, A, A2 = Peer("own", 1), Peer("a", 1), Peer("a", 2)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_ticket_works_once_until_it_expires() -> None:
    clock = Clock()
    desk = WorkerDesk(OWN, clock=clock)
    ticket, late = desk.issue(A, valid_for_s=5.0), desk.issue(A, valid_for_s=5.0)
    assert ticket != late
    desk.enter(A, ticket_name(ticket))
    with pytest.raises(Unauthorized):
        desk.enter(A, ticket_name(ticket))
    clock.now_s = 5.0
    with pytest.raises(Unauthorized):
        desk.enter(A, ticket_name(late))


def test_a_stolen_ticket_is_refused_and_used_up() -> None:
    desk = WorkerDesk(OWN)
    ticket = desk.issue(A, valid_for_s=5.0)
    with pytest.raises(Unauthorized):
        desk.enter(Peer("b", 1), ticket_name(ticket))
    with pytest.raises(Unauthorized):
        desk.enter(A, ticket_name(ticket))


def test_a_later_incarnation_replaces_the_earlier() -> None:
    desk = WorkerDesk(OWN)
    ticket = desk.issue(A, valid_for_s=5.0)
    assert desk.is_current(A)
    desk.issue(A2, valid_for_s=5.0)
    assert desk.is_current(A2) and not desk.is_current(A)
    with pytest.raises(Unauthorized):
        desk.enter(A, ticket_name(ticket))
    with pytest.raises(Unauthorized):
        desk.issue(A, valid_for_s=5.0)


def test_tickets_are_bounded_and_old_ones_make_room() -> None:
    clock = Clock()
    desk = WorkerDesk(OWN, clock=clock)
    with pytest.raises(Overloaded):
        for _ in range(5000):
            desk.issue(A, valid_for_s=5.0)
    desk.issue(Peer("b", 1), valid_for_s=5.0)  # The limit is per peer.
    clock.now_s = 6.0
    desk.issue(A, valid_for_s=5.0)


def test_the_error_names_an_unknown_kind() -> None:
    with pytest.raises(InvalidRequest, match="attention"):
        WorkerDesk(OWN).receiver("attention")
