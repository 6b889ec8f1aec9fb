"""The creditor: caps, parts, leases by its own clock, fencing, users that delay the return."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.core.lendable_memory import lend
from services.worker.peers.lending.core.table import RBlockTable
from shared.messages.lending import BorrowBlocks, BorrowReply, Grant, KvTier, Refusal
from tests.services.worker.peers.lending.builders import KV, borrow, give_back, grant, renew

TERMS = Terms(most_blocks=6, lease_s=4.0, grace_s=0.5, fingerprint=KV)


def creditor(terms: Terms = TERMS) -> Grants:
    return Grants(RBlockTable("c", 20), incarnation=1, terms=terms)


@pytest.fixture
def grants() -> Iterator[Grants]:
    made = creditor()
    yield made
    made.check_integrity()


def lent(grants: Grants, debtor: str, *blocks: int, request: int = 1, now_s: float = 0.0) -> Grant:
    asked = borrow(debtor, blocks=len(blocks), request=request)
    assert grants.answer(asked) == len(blocks)
    grant = grants.lend(asked, blocks, now_s).grant
    assert grant is not None and grant.blocks == blocks
    grants.check_integrity()
    return grant


def refusal(answer: BorrowReply | int) -> Refusal | None:
    assert isinstance(answer, BorrowReply) and answer.grant is None
    return answer.refusal


def test_the_cap_allows_a_part_and_then_nothing(grants: Grants) -> None:
    lent(grants, "d", 0, 1, 2, 3)
    assert grants.answer(borrow("e", blocks=5)) == 2
    assert refusal(grants.answer(borrow("e", blocks=5, least=3))) is Refusal.AT_CAP
    lent(grants, "e", 4, 5)
    assert refusal(grants.answer(borrow("f", blocks=1))) is Refusal.AT_CAP
    assert grants.lend(borrow("f"), [], 0.0).refusal is Refusal.NOTHING_FREE


def test_other_kv_a_workers_own_request_and_a_disabled_creditor_are_refused() -> None:
    assert refusal(creditor().answer(borrow(fingerprint=b"other"))) is Refusal.OTHER_KV
    assert refusal(creditor().answer(borrow("c"))) is Refusal.NOT_LENDING
    assert refusal(creditor(Terms(most_blocks=0, fingerprint=KV)).answer(borrow())) is Refusal.NOT_LENDING
    assert refusal(creditor().answer(borrow(tier=KvTier.HOST))) is Refusal.NOT_LENDING
    frozen = creditor()
    frozen.frozen = True
    assert refusal(frozen.answer(borrow())) is Refusal.NOT_LENDING


def test_an_empty_fingerprint_matches_nothing() -> None:
    """Not even another empty one: it may be another model or block size."""
    nameless = creditor(Terms(most_blocks=6))
    assert refusal(nameless.answer(borrow(fingerprint=b""))) is Refusal.OTHER_KV
    assert refusal(nameless.answer(borrow())) is Refusal.OTHER_KV
    assert refusal(creditor().answer(borrow(fingerprint=b""))) is Refusal.OTHER_KV


def test_the_same_request_gets_the_same_grant(grants: Grants) -> None:
    first = lent(grants, "d", 0, 1)
    assert grants.answer(borrow("d", blocks=2, request=1)) == BorrowReply(grant=first)
    assert grants.answer(borrow("d", blocks=2, request=1, incarnation=2)) == 2


def test_a_lease_lasts_a_grace_longer_than_told_and_while_renewed(grants: Grants) -> None:
    lent(grants, "d", 0, 1)
    lent(grants, "e", 2)
    renewed = grants.renew(renew("d", 1), 4.4)
    assert [(held.grant_id, held.generation) for held in renewed.held] == [(1, 1)]
    assert grants.tick(4.4) == []
    assert grants.tick(4.5) == [Freed(KvTier.DEVICE, (2,))]
    assert grants.renew(renew("e", 2), 4.6).held == ()
    assert grants.renew(renew("d", 1), 8.9).held == (), "over by the creditor's clock, ticked or not"
    assert grants.tick(8.9) == [Freed(KvTier.DEVICE, (0, 1))]
    assert (len(grants), grants.lent_blocks) == (0, 0)


def test_leases_of_another_incarnation_or_debtor_are_not_renewed(grants: Grants) -> None:
    lent(grants, "d", 0)
    assert grants.renew(renew("d", 1, creditor_incarnation=2), 1.0).held == ()
    assert grants.renew(renew("d", 1, incarnation=2), 1.0).held == ()
    assert grants.renew(renew("e", 1), 1.0).held == ()


def test_returning_is_idempotent_and_raises_the_generation(grants: Grants) -> None:
    lent(grants, "d", 0, 1, 2)
    reply, freed = grants.give_back(give_back("d", 1, 0, 1))
    assert (reply.generation, freed) == (2, Freed(KvTier.DEVICE, (0, 1)))
    reply, freed = grants.give_back(give_back("d", 1, 0, 1))
    assert (reply.generation, freed) == (2, None)
    assert grants.give_back(give_back("e", 1, 2))[1] is None, "not that debtor's"
    assert not grants.enter(1, 3, [2], 0.0), "a generation that never was"
    assert grants.enter(1, 2, [2], 0.0)
    assert grants.enter(1, 1, [2], 0.0), "the debtor may not know yet that the others are back"
    for generation in (1, 2):
        assert not grants.enter(1, generation, [0], 0.0), "no longer in the grant"


def test_the_last_user_frees_returned_blocks(grants: Grants) -> None:
    lent(grants, "d", 0, 1)
    assert grants.enter(1, 1, [0], 1.0) and grants.enter(1, 1, [1], 1.0)
    assert grants.tick(9.0) == []
    assert not grants.enter(1, 1, [0], 9.0)
    assert grants.leave(1) is None
    grants.check_integrity()
    assert grants.leave(1) == Freed(KvTier.DEVICE, (0, 1))
    grants.check_integrity()
    with pytest.raises(KeyError):
        grants.leave(1)


def test_a_restarted_debtor_ends_its_old_grants(grants: Grants) -> None:
    lent(grants, "d", 0, 1)
    assert grants.on_incarnation("d", 1) == []
    assert grants.on_incarnation("d", 2) == [Freed(KvTier.DEVICE, (0, 1))]


def test_each_tier_has_a_cap_and_numbers_of_its_own() -> None:
    grants = Grants(
        RBlockTable("c", 20, 4), 1, Terms(2, 4.0, 0.5, KV, most_host_blocks=4, host_attends=False)
    )
    device = lent(grants, "d", 0, 1)
    assert refusal(grants.answer(borrow("d", request=2))) is Refusal.AT_CAP
    asked = borrow("d", blocks=9, request=3, tier=KvTier.HOST)
    assert grants.answer(asked) == 4, "a part"
    host = grants.lend(asked, [0, 1, 2], 0.0).grant
    assert host is not None and (host.tier, host.blocks) == (KvTier.HOST, (0, 1, 2))
    assert (device.attends, host.attends) == (True, False)
    assert grants.answer(borrow("d", blocks=9, request=4, tier=KvTier.HOST)) == 1
    assert grants.renew(renew("d", 1, 2), 1.0, short_blocks=9).wanted_back_blocks == 2, "of the device"
    assert grants.give_back(give_back("d", 2, 1))[1] == Freed(KvTier.HOST, (1,))
    assert grants.give_back(give_back("d", 1, 1))[1] == Freed(KvTier.DEVICE, (1,))
    assert grants.tick(9.0) == [Freed(KvTier.DEVICE, (0,)), Freed(KvTier.HOST, (0, 2))]
    grants.check_integrity()


two_tiers = st.sampled_from(list(KvTier))
events = st.one_of(
    *[st.tuples(st.just("borrow"), st.sampled_from("de"), two_tiers, st.integers(1, 9))] * 3,
    st.tuples(st.just("return"), st.sampled_from("de"), st.integers(1, 12), st.integers(0, 7)),
    st.tuples(st.just("renew"), st.sampled_from("de"), st.integers(1, 12)),
    st.tuples(st.just("enter"), st.integers(1, 12)),
    st.tuples(st.just("leave"), st.integers(1, 12)),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 2.0, 4.6])),
    st.tuples(st.just("die"), st.sampled_from("de")),
)


class TwoPools:
    """A creditor with its pools, and a debt of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pools = {KvTier.DEVICE: BlockPool(8, 16), KvTier.HOST: BlockPool(5, 16)}
        self.table = RBlockTable("c", 8, 5)
        self.grants = Grants(self.table, 1, Terms(6, 4.0, 0.5, KV, most_host_blocks=5))
        self.lives = {"d": 1, "e": 1}
        self.requests = 0
        self.inside: list[int] = []
        self.borrowed = self.table.add(grant("x", 0, 1, 2, 3))

    def free(self, *freed: Freed | None) -> None:
        for part in freed:
            if part is not None:
                self.pools[part.tier].readmit(part.blocks)

    def borrow(self, debtor: str, tier: KvTier, blocks: int) -> None:
        self.requests += 1
        life = self.lives[debtor]
        asked = borrow(debtor, blocks=blocks, request=self.requests, incarnation=life, tier=tier)
        most = self.grants.answer(asked)
        if isinstance(most, int):
            self.grants.lend(asked, lend(self.pools[tier], most, 1, 0), self.now_s)

    def give_back(self, debtor: str, grant_id: int, block: int) -> None:
        asked = give_back(debtor, grant_id, block, incarnation=self.lives[debtor])
        self.free(self.grants.give_back(asked)[1])

    def renew(self, debtor: str, grant_id: int) -> None:
        self.grants.renew(renew(debtor, grant_id, incarnation=self.lives[debtor]), self.now_s)

    def enter(self, grant_id: int) -> None:
        generation = self.grants.generation(grant_id)
        if generation is not None and self.grants.enter(grant_id, generation, [], self.now_s):
            self.inside.append(grant_id)

    def leave(self, grant_id: int) -> None:
        if grant_id in self.inside:
            self.inside.remove(grant_id)
            self.free(self.grants.leave(grant_id))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.free(*self.grants.tick(self.now_s))

    def die(self, debtor: str) -> None:
        self.lives[debtor] += 1
        self.free(*self.grants.on_incarnation(debtor, self.lives[debtor]))

    def check(self) -> None:
        self.table.check_integrity()
        self.grants.check_integrity()
        for tier, pool in self.pools.items():
            pool.check_integrity([])
            assert pool.withdrawn_blocks == self.table.lent_blocks(tier) <= self.grants.terms.most(tier)
            assert not any(self.table.lent_row(tier, number) for number in self.borrowed)


@settings(max_examples=150)
@given(st.lists(events, max_size=60))
def test_neither_tier_is_over_committed_and_leases_free_both(events: list[tuple[Any, ...]]) -> None:
    world = TwoPools()
    for verb, *details in events:
        getattr(world, "give_back" if verb == "return" else verb)(*details)
        world.check()
    for grant_id in list(world.inside):
        world.leave(grant_id)
    world.wait(9.0)
    world.check()
    assert {tier: pool.free_blocks for tier, pool in world.pools.items()} == {"device": 8, "host": 5}


def test_a_creditor_that_is_short_asks_each_debtor_for_its_share(grants: Grants) -> None:
    lent(grants, "d", 0, 1, 2, 3)
    lent(grants, "e", 4, 5)
    assert grants.renew(renew("d", 1), 1.0, short_blocks=3).wanted_back_blocks == 2
    assert grants.renew(renew("e", 2), 1.0, short_blocks=99).wanted_back_blocks == 2


def test_a_worker_is_a_debtor_until_its_last_block_is_back(grants: Grants) -> None:
    first, second = lent(grants, "d", 0, 1), lent(grants, "e", 2, request=2)
    grants.give_back(give_back("d", first.grant_id, 0))
    assert grants.debtors() == {"d", "e"}
    grants.give_back(give_back("d", first.grant_id, 1))
    assert grants.debtors() == {"e"}
    assert grants.enter(second.grant_id, 1, (), 1.0)
    grants.tick(99.0)
    assert grants.debtors() == {"e"}, "the grant has a user"
    grants.leave(second.grant_id)
    assert grants.debtors() == set()


def cached(debtor: str, *blocks: int, request: int = 1) -> BorrowBlocks:
    asked = borrow(debtor, blocks=len(blocks), request=request, tier=KvTier.HOST)
    return msgspec.structs.replace(asked, for_cache=True)


def test_grants_of_caches_yield_to_sequences_newest_first() -> None:
    grants = Grants(RBlockTable("c", 4, 6), 1, Terms(4, 4.0, 0.5, KV, most_host_blocks=6))
    grants.lend(borrow("s", blocks=1, tier=KvTier.HOST), [0], 0.0)
    grants.lend(cached("d", 1, 2), [1, 2], 0.0)
    grants.lend(cached("e", 3, 4), [3, 4], 0.0)
    assert grants.yielding_blocks(KvTier.HOST) == 4
    assert grants.yielding_blocks(KvTier.DEVICE) == 0
    assert grants.give_way(KvTier.HOST, 0) == []
    assert grants.give_way(KvTier.HOST, 1) == [Freed(KvTier.HOST, (3, 4))]
    assert grants.renew(renew("e", 3), 0.1).held == (), "its debtor hears of it with the next renewal"
    assert grants.give_way(KvTier.HOST, 9) == [Freed(KvTier.HOST, (1, 2))]
    assert grants.lent_blocks == 1, "what a sequence has stays"
    grants.check_integrity()


def test_a_grant_being_read_yields_after_its_reader_leaves() -> None:
    grants = Grants(RBlockTable("c", 4, 6), 1, Terms(4, 4.0, 0.5, KV, most_host_blocks=6))
    grants.lend(cached("d", 1, 2), [1, 2], 0.0)
    assert grants.enter(1, 1, [1], 0.0)
    assert grants.give_way(KvTier.HOST, 2) == []
    assert not grants.enter(1, 1, [1], 0.0)
    assert grants.leave(1) == Freed(KvTier.HOST, (1, 2))
    grants.check_integrity()
