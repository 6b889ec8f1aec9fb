"""The creditor: caps, parts, leases by its own clock, fencing, users that delay the return."""

import pytest

from services.worker.lending.grants import Freed, Grants, Terms
from services.worker.lending.table import RBlockTable
from shared.messages.lending import BorrowReply, Grant, KvTier, Refusal
from tests.services.worker.lending.builders import borrow, give_back, renew

TERMS = Terms(most_blocks=6, lease_s=4.0, grace_s=0.5, fingerprint=b"")


def creditor(terms: Terms = TERMS) -> Grants:
    return Grants(RBlockTable("c", 20), incarnation=1, terms=terms)


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


def test_the_cap_allows_a_part_and_then_nothing() -> None:
    grants = creditor()
    lent(grants, "d", 0, 1, 2, 3)
    assert grants.answer(borrow("e", blocks=5)) == 2
    assert refusal(grants.answer(borrow("e", blocks=5, least=3))) is Refusal.AT_CAP
    lent(grants, "e", 4, 5)
    assert refusal(grants.answer(borrow("f", blocks=1))) is Refusal.AT_CAP
    assert grants.lend(borrow("f"), [], 0.0).refusal is Refusal.NOTHING_FREE


def test_other_kv_oneself_and_a_switched_off_creditor_are_refused() -> None:
    assert refusal(creditor().answer(borrow(fingerprint=b"other"))) is Refusal.OTHER_KV
    assert refusal(creditor().answer(borrow("c"))) is Refusal.NOT_LENDING
    assert refusal(creditor(Terms(most_blocks=0)).answer(borrow())) is Refusal.NOT_LENDING
    assert refusal(creditor().answer(borrow(tier=KvTier.HOST))) is Refusal.NOT_LENDING
    frozen = creditor()
    frozen.set_frozen_terms(frozen=True)
    assert refusal(frozen.answer(borrow())) is Refusal.NOT_LENDING


def test_the_same_request_gets_the_same_grant() -> None:
    grants = creditor()
    first = lent(grants, "d", 0, 1)
    assert grants.answer(borrow("d", blocks=2, request=1)) == BorrowReply(grant=first)
    assert grants.answer(borrow("d", blocks=2, request=1, incarnation=2)) == 2


def test_a_lease_lasts_a_grace_longer_than_told_and_as_long_as_it_is_renewed() -> None:
    grants = creditor()
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
    grants.check_integrity()


def test_leases_of_another_life_or_debtor_are_not_renewed() -> None:
    grants = creditor()
    lent(grants, "d", 0)
    assert grants.renew(renew("d", 1, creditor_incarnation=2), 1.0).held == ()
    assert grants.renew(renew("d", 1, incarnation=2), 1.0).held == ()
    assert grants.renew(renew("e", 1), 1.0).held == ()


def test_returning_is_idempotent_and_raises_the_generation() -> None:
    grants = creditor()
    lent(grants, "d", 0, 1, 2)
    reply, freed = grants.give_back(give_back("d", 1, 0, 1))
    assert (reply.generation, reply.left_blocks, freed) == (2, 1, Freed(KvTier.DEVICE, (0, 1)))
    reply, freed = grants.give_back(give_back("d", 1, 0, 1))
    assert (reply.generation, freed) == (2, None)
    assert grants.give_back(give_back("e", 1, 2))[1] is None, "not that debtor's"
    assert not grants.enter(1, 1, [2], 0.0), "a stale generation"
    assert grants.enter(1, 2, [2], 0.0)
    assert not grants.enter(1, 2, [0], 0.0), "not in the grant any more"
    grants.check_integrity()


def test_blocks_somebody_is_at_work_on_are_freed_when_the_last_has_left() -> None:
    grants = creditor()
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


def test_a_debtors_new_life_ends_what_the_old_one_held() -> None:
    grants = creditor()
    lent(grants, "d", 0, 1)
    assert grants.on_incarnation("d", 1) == []
    assert grants.on_incarnation("d", 2) == [Freed(KvTier.DEVICE, (0, 1))]


def test_a_creditor_in_need_tells_each_debtor_its_part() -> None:
    grants = creditor()
    lent(grants, "d", 0, 1, 2, 3)
    lent(grants, "e", 4, 5)
    assert grants.renew(renew("d", 1), 1.0, short_blocks=3).wanted_back_blocks == 2
    assert grants.renew(renew("e", 2), 1.0, short_blocks=99).wanted_back_blocks == 2
