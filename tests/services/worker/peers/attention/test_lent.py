"""Access to lent blocks from threads that serve links, and which copies of blocks are current."""

import sys
import threading
from collections.abc import Sequence

import numpy as np

from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import Span, pack
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.attention.write_watch import WriteWatch
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.lending.service import loans
from services.worker.peers.transport.base import Peer
from shared.messages.lending import KvTier
from tests.services.worker.peers.lending.builders import borrow, give_back, renew

DEBTOR = Peer("debtor", 3)
REF = GrantRef(1, 1)
BLOCK_TOKENS = 4


def is_lent(lent: LentGrants, grants: Sequence[GrantRef], tier: KvTier, blocks: Sequence[int]) -> bool:
    found = lent.loans(DEBTOR, grants, tier, np.array(blocks, dtype=np.int32))
    assert found is None or set(found.tolist()) <= {ref.grant_id for ref in grants}
    return found is not None


class World:
    """A creditor with one grant of three blocks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.freed: list[Freed] = []
        self.table = RBlockTable("creditor", 8, 3)
        self.grants = Grants(self.table, 1, Terms(8, 4.0, 0.5, most_host_blocks=3), threading.RLock())
        self.lent = LentGrants(self.grants, self.table, self.freed.append, lambda: self.now_s)
        reply = self.grants.lend(borrow("debtor", incarnation=3, blocks=3), [2, 5, 6], 0.0)
        assert reply.grant is not None and reply.grant.grant_id == REF.grant_id

    def covers(self, *blocks: int) -> bool:
        return is_lent(self.lent, [REF], KvTier.DEVICE, blocks)

    def give_back(self, *blocks: int) -> Freed | None:
        return self.grants.give_back(give_back("debtor", 1, *blocks, incarnation=3))[1]


def test_only_the_debtor_enters_and_only_during_the_lease() -> None:
    world = World()
    assert world.lent.enter(DEBTOR, [REF])
    world.lent.leave(DEBTOR, [REF])
    assert not world.lent.enter(Peer("debtor", 2), [REF])
    assert not world.lent.enter(Peer("other", 3), [REF])
    assert not world.lent.enter(DEBTOR, [REF, GrantRef(2, 1)])
    world.now_s = 4.6
    assert not world.lent.enter(DEBTOR, [REF])
    (freed,) = world.grants.tick(4.6)
    assert freed.blocks == (2, 5, 6), "a refused call leaves no user"


def test_a_grant_covers_its_own_blocks_only() -> None:
    world = World()
    assert world.covers(2, 6, 5) and world.covers()
    assert not world.covers(2, 3)
    assert not is_lent(world.lent, [GrantRef(7, 1)], KvTier.DEVICE, [2])
    assert not world.covers(-1) and not world.covers(8)


def test_block_numbers_belong_to_one_tier() -> None:
    world = World()
    asked = borrow("debtor", incarnation=3, request=2, blocks=2, tier=KvTier.HOST)
    world.grants.lend(asked, [0, 2], 0.0)
    both = [REF, GrantRef(2, 1)]
    for tier, blocks, is_covered in (
        (KvTier.HOST, [0, 2], True),
        (KvTier.HOST, [5], False),
        (KvTier.DEVICE, [0], False),
        (KvTier.DEVICE, [2, 5], True),
    ):
        assert is_lent(world.lent, both, tier, blocks) is is_covered
    assert not is_lent(world.lent, [REF], KvTier.HOST, [2])


def test_an_earlier_generation_is_served_for_blocks_that_are_left() -> None:
    world = World()
    world.give_back(5)
    assert world.lent.enter(DEBTOR, [REF]) == (GrantRef(1, 2),), "what to compare with the next time"
    assert world.covers(2, 6) and not world.covers(5)
    world.lent.leave(DEBTOR, [REF])
    assert world.lent.enter(DEBTOR, [GrantRef(1, 3)]) is None, "never given"


def test_blocks_returned_during_an_access_are_no_longer_lent() -> None:
    """It is not free yet, because the user inside may write to it, but no user may enter."""
    world = World()
    assert world.lent.enter(DEBTOR, [REF])
    assert world.give_back(5) is None
    assert world.covers(2, 6) and not world.covers(5)
    assert world.table.lent_row(KvTier.DEVICE, 5) is not None
    world.grants.check_integrity()
    world.lent.leave(DEBTOR, [REF])
    assert [freed.blocks for freed in world.freed] == [(5,)]


def test_loans_are_reported_while_links_free_blocks() -> None:
    """A heartbeat iterated over a table that a link's thread changed, which stopped the worker."""
    world = World()
    world.table = RBlockTable("creditor", 4096)
    world.grants = Grants(world.table, 1, Terms(4096, 1e9, 0.5), threading.RLock())
    freed: list[Freed] = []
    lent = LentGrants(world.grants, world.table, freed.append, lambda: 0.0)
    telling, failures = threading.Event(), []

    def serve_links() -> None:
        try:
            for number in range(300):
                asked = borrow("debtor", incarnation=3, request=number, blocks=1500)
                grant = world.grants.lend(asked, range(1500), 0.0).grant
                assert grant is not None
                ref = GrantRef(grant.grant_id, 1)
                assert lent.enter(DEBTOR, [ref])
                back = give_back("debtor", grant.grant_id, *grant.blocks, incarnation=3)
                assert world.grants.give_back(back)[1] is None
                lent.leave(DEBTOR, [ref])
        except BaseException as error:
            failures.append(error)
        finally:
            telling.set()

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=serve_links)
    try:
        thread.start()
        while not telling.is_set():
            assert loans(world.table)["lent_blocks"] in (0, 1500)
            world.grants.answer(borrow("debtor", incarnation=3, request=-1, blocks=1))
            world.grants.renew(renew("debtor", 1, incarnation=3), 0.0)
    finally:
        sys.setswitchinterval(before_s)
        thread.join()
    assert not failures and sum(len(part.blocks) for part in freed) == 300 * 1500


def test_a_write_invalidates_the_copy_of_a_block() -> None:
    homes = Homes(2)
    homes.place([10, 11, 12], 1, [5, 6, 7])
    watch = WriteWatch(BLOCK_TOKENS)
    watch.restart({(1, 5): 0, (1, 6): 1})
    assert watch.is_copy((1, 5), 0) and not watch.is_copy((1, 5), 1) and not watch.is_copy((1, 7), 2)
    parts = split(pack([Span(5, 1, [10, 11]), Span(0, 4, [12])], BLOCK_TOKENS), homes, BLOCK_TOKENS)
    assert sum(int(np.count_nonzero(part.spans.slots >= 0)) for part in parts) == 5
    watch.on_step(parts)
    assert watch.is_copy((1, 5), 0), "it was only read"
    assert not watch.is_copy((1, 6), 1), "position 5 is in it"


def test_a_new_round_forgets_earlier_copies() -> None:
    watch = WriteWatch(BLOCK_TOKENS)
    watch.restart({(1, 5): 0})
    watch.restart({(1, 6): 0})
    assert not watch.is_copy((1, 5), 0) and watch.is_copy((1, 6), 0)
