"""The creditor: caps, parts, leases by its own clock, fencing, users that delay the return."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.peers.lending.core.grants import Freed, Grants, Terms, lend
from services.worker.peers.lending.stock import Stock
from shared.blocks import chain, root
from shared.messages.lending import BorrowBlocks, BorrowReply, Grant, KvTier, Refusal
from tests.services.worker.kv.rig import MemoryMover
from tests.services.worker.peers.lending.builders import KV, borrow, give_back, open_door, renew

TERMS = Terms(most_blocks=6, lease_s=4.0, grace_s=0.5, fingerprint=KV)


def creditor(terms: Terms = TERMS) -> Grants:
    return Grants("c", 1, terms, 20, 4)


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


D = ("d", 1)


def covers(grants: Grants, *blocks: int) -> bool:
    """Whether these device blocks are lent under grant 1."""
    return grants.grants_of(KvTier.DEVICE, np.array(blocks, dtype=np.int32), [1]) is not None


def refusal(answer: BorrowReply | int) -> Refusal | None:
    assert isinstance(answer, BorrowReply) and answer.grant is None
    return answer.refusal


def test_the_cap_allows_a_part_and_then_nothing(grants: Grants) -> None:
    lent(grants, "d", 0, 1, 2, 3)
    assert grants.answer(borrow("e", blocks=5)) == 2
    assert refusal(grants.answer(borrow("e", blocks=5, least_blocks=3))) is Refusal.AT_CAP
    lent(grants, "e", 4, 5)
    assert refusal(grants.answer(borrow("f", blocks=1))) is Refusal.AT_CAP
    assert grants.lend(borrow("f"), [], 0.0).refusal is Refusal.NOTHING_FREE


NAMELESS, OFF = Terms(most_blocks=6), Terms(most_blocks=0, fingerprint=KV)


@pytest.mark.parametrize(
    ("terms", "asked", "why"),
    [
        pytest.param(TERMS, borrow(fingerprint=b"other"), Refusal.OTHER_KV, id="other KV"),
        pytest.param(TERMS, borrow("c"), Refusal.NOT_LENDING, id="its own request"),
        pytest.param(OFF, borrow(), Refusal.NOT_LENDING, id="lends nothing"),
        pytest.param(TERMS, borrow(tier=KvTier.HOST), Refusal.NOT_LENDING, id="no host memory"),
        pytest.param(NAMELESS, borrow(fingerprint=b""), Refusal.OTHER_KV, id="both nameless"),
        pytest.param(NAMELESS, borrow(), Refusal.OTHER_KV, id="nameless creditor"),
        pytest.param(TERMS, borrow(fingerprint=b""), Refusal.OTHER_KV, id="nameless debtor"),
    ],
)
def test_what_is_not_for_the_asker_is_refused(terms: Terms, asked: BorrowBlocks, why: Refusal) -> None:
    """An empty fingerprint matches nothing, not even another: it may be another model or block size."""
    assert refusal(creditor(terms).answer(asked)) is why
    frozen = creditor()
    frozen.frozen = True
    assert refusal(frozen.answer(borrow())) is Refusal.NOT_LENDING


def test_the_same_request_gets_the_same_grant_until_the_debtor_restarts(grants: Grants) -> None:
    first = lent(grants, "d", 0, 1)
    assert grants.answer(borrow("d", blocks=2, request=1)) == BorrowReply(grant=first)
    assert grants.answer(borrow("d", blocks=2, request=1, incarnation=2)) == 2
    assert grants.on_incarnation("d", 1) == []
    assert grants.on_incarnation("d", 2) == [Freed(KvTier.DEVICE, (0, 1))]


def test_a_lease_lasts_a_grace_longer_than_told_and_while_renewed(grants: Grants) -> None:
    lent(grants, "d", 0, 1)
    lent(grants, "e", 2)
    renewed = grants.renew(renew("d", 1), 4.4)
    assert [(held.grant_id, held.generation) for held in renewed.held] == [(1, 1)]
    assert grants.tick(4.4) == []
    assert grants.enter(("e", 1), 2, 1, 4.6) is None, "over by the clock alone"
    assert grants.tick(4.5) == [Freed(KvTier.DEVICE, (2,))]
    assert grants.renew(renew("e", 2), 4.6).held == ()
    assert grants.renew(renew("d", 1), 8.9).held == (), "over by the creditor's clock, ticked or not"
    assert grants.tick(8.9) == [Freed(KvTier.DEVICE, (0, 1))]
    assert grants.lent_to() == {}


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
    assert grants.enter(D, 1, 3, 0.0) is None, "a generation that never was"
    assert grants.enter(D, 1, 2, 0.0) == 2
    assert grants.enter(D, 1, 1, 0.0) == 2, "the debtor may not know yet that the others are back"
    assert grants.enter(("e", 1), 1, 1, 0.0) is None
    assert covers(grants, 2) and not covers(grants, 0, 2), "no longer in the grant"


def test_the_last_user_frees_returned_blocks(grants: Grants) -> None:
    lent(grants, "d", 0, 1)
    assert grants.enter(D, 1, 1, 1.0) and grants.enter(D, 1, 1, 1.0)
    assert grants.give_back(give_back("d", 1, 0))[1] is None
    assert covers(grants, 1) and not covers(grants, 0), "not free yet, and no longer lent"
    assert grants.tick(9.0) == []
    assert grants.enter(D, 1, 1, 9.0) is None
    assert grants.leave(1) is None
    grants.check_integrity()
    assert grants.leave(1) == Freed(KvTier.DEVICE, (0, 1))
    grants.check_integrity()
    with pytest.raises(KeyError):
        grants.leave(1)


def test_each_tier_has_a_cap_and_numbers_of_its_own() -> None:
    grants = creditor(Terms(2, 4.0, 0.5, KV, most_host_blocks=4, host_attends=False))
    device = lent(grants, "d", 0, 1)
    assert refusal(grants.answer(borrow("d", request=2))) is Refusal.AT_CAP
    asked = borrow("d", blocks=9, request=3, tier=KvTier.HOST)
    assert grants.answer(asked) == 4, "a part"
    host = grants.lend(asked, [0, 1, 2], 0.0).grant
    assert host is not None and (host.tier, host.blocks) == (KvTier.HOST, (0, 1, 2))
    assert (device.attends, host.attends) == (True, False)
    assert grants.answer(borrow("d", blocks=9, request=4, tier=KvTier.HOST)) == 1
    assert grants.lent_to(KvTier.HOST) == {"d": 3} and grants.lent_to() == {"d": 5}
    assert covers(grants, 0, 1) and not covers(grants, 2), "each tier has its own numbers"
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
    def __init__(self) -> None:
        self.now_s = 0.0
        self.pools = {KvTier.DEVICE: BlockPool(8, 16), KvTier.HOST: BlockPool(5, 16)}
        self.grants = Grants("c", 1, Terms(6, 4.0, 0.5, KV, most_host_blocks=5), 8, 5)
        self.lives = {"d": 1, "e": 1}
        self.requests = 0
        self.inside: list[int] = []

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
        lent = self.grants._grants.get(grant_id)
        if lent is not None and self.grants.enter(lent.debtor, grant_id, 1, self.now_s):
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
        self.grants.check_integrity()
        for tier, pool in self.pools.items():
            pool.check_integrity([])
            assert pool.withdrawn_blocks == self.grants.lent_blocks(tier) <= self.grants.terms.most(tier)


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
    assert set(grants.lent_to()) == {"d", "e"}
    grants.give_back(give_back("d", first.grant_id, 1))
    assert set(grants.lent_to()) == {"e"}
    assert grants.enter(("e", 1), second.grant_id, 1, 1.0)
    grants.tick(99.0)
    assert set(grants.lent_to()) == {"e"}, "the grant has a user"
    grants.leave(second.grant_id)
    assert grants.lent_to() == {}


def test_grants_of_caches_yield_to_sequences_newest_first_and_after_their_readers_leave() -> None:
    grants = Grants("c", 1, Terms(4, 4.0, 0.5, KV, most_host_blocks=6), 4, 6)
    grants.lend(borrow("s", tier=KvTier.HOST), [0], 0.0)
    grants.lend(borrow("d", tier=KvTier.HOST, for_cache=True), [1, 2], 0.0)
    grants.lend(borrow("e", tier=KvTier.HOST, for_cache=True), [3, 4], 0.0)
    assert grants.yielding_blocks() == 4
    assert grants.give_way(0) == []
    assert grants.give_way(1) == [Freed(KvTier.HOST, (3, 4))]
    assert grants.renew(renew("e", 3), 0.1).held == (), "its debtor hears of it with the next renewal"
    assert grants.enter(D, 2, 1, 0.0)
    assert grants.give_way(9) == []
    assert grants.enter(D, 2, 1, 0.0) is None
    assert grants.leave(2) == Freed(KvTier.HOST, (1, 2))
    assert grants.lent_blocks() == 1, "what a sequence has stays"
    grants.check_integrity()


@pytest.mark.parametrize("tier", list(KvTier))
def test_unknown_and_lent_blocks_cannot_be_lent(tier: KvTier) -> None:
    grants = creditor()
    grants.lend(borrow("d", tier=tier), [0, 3], 0.0)
    for wrong in ([3], [1, 1], [20], [-1]):
        with pytest.raises(ValueError, match="not this worker's"):
            grants.lend(borrow("e", tier=tier), wrong, 0.0)
    assert grants.lent_to(tier) == {"d": 2}
    assert grants.lent_under(tier, [1])[:4].tolist() == [1, 0, 0, 1]


# --- blocks leave a pool, cached prefixes first, and come back


def test_cached_prefixes_are_evicted_and_used_blocks_are_not() -> None:
    mover = MemoryMover()
    cache = PrefixCache(BlockPool(6, 2), Tiers(host_blocks=8), mover, CostGate())
    names = chain(root(b"f"), bytes(4 * 2 * 4), 2)
    mover.publish(cache, names)
    blocks = cache.hold(names)
    assert lend(cache, most_blocks=3, least_blocks=3, keep_blocks=0) == [], "a sequence uses four"
    with pytest.raises(ValueError, match="name"):
        cache.withdraw(blocks[:1])
    cache.release(blocks)
    taken = lend(cache, most_blocks=5, least_blocks=5, keep_blocks=1)
    assert (len(taken), cache.total_blocks, cache.counts["evicted_device"]) == (5, 1, 3)
    cache.check_integrity([])
    cache.readmit(taken)
    hit = cache.acquire(names, 4)
    assert hit.loaded[1] > 0 or hit.blocks, "the host tier still has what was evicted"
    cache.check_integrity(hit.blocks)


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "lend", "back"]), st.integers(0, 9)), max_size=60))
def test_blocks_are_conserved(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(16, 4)
    held: list[int] = []
    lent: list[int] = []
    for verb, number in moves:
        if verb == "take" and pool.can_allocate(number):
            held += pool.allocate(number)
        elif verb == "take":
            with pytest.raises(ValueError, match="free"):
                pool.allocate(number)
        elif verb == "give":
            pool.release(held[:number])
            del held[:number]
        elif verb == "lend":
            lent += lend(pool, number, 1, 3)
            assert lend(pool, 20, pool.free_blocks, 1) == [], "kept blocks stay"
            assert pool.free_blocks >= 3 or not number or pool.withdrawn_blocks == len(lent)
        elif verb == "back":
            pool.readmit(lent[:number])
            del lent[:number]
        pool.check_integrity(held)
        assert pool.total_blocks == 16 - len(lent) == len(held) + pool.free_blocks


async def test_each_tier_lends_its_own_blocks_and_only_the_device_keeps_some() -> None:
    pool = BlockPool(20, 16)
    stock = Stock(open_door(), pool, keep_blocks=18, host_blocks=3)
    device, host = await stock.take(KvTier.DEVICE, 9, 1), await stock.take(KvTier.HOST, 9, 1)
    assert (len(device), len(host), stock.host_free_blocks) == (2, 3, 0)
    assert await stock.take(KvTier.HOST, 1, 1) == []
    back = [Freed(KvTier.HOST, tuple(host[:2])), Freed(KvTier.DEVICE, tuple(device))]
    await stock.put_back(back, lambda blocks: list(blocks[1:]))
    assert (pool.withdrawn_blocks, stock.host_free_blocks) == (1, 2), "one of the device was kept"
    assert await stock.take(KvTier.HOST, 3, 3) == [], "fewer are of no use"
    assert await Stock(open_door(), pool, 0, 0).take(KvTier.HOST, 1, 1) == []
