"""The search for a creditor, question by question."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.lending.core.borrowing import AskCreditor, Borrowing, CreditorQuestion, is_answer
from shared.messages.commands import CreditorCandidate, CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowReply, Grant, KvTier, Refusal
from tests.services.worker.peers.lending.builders import borrow, grant

NO = BorrowReply(refusal=Refusal.AT_CAP)


def candidates(*names: str) -> CreditorCandidates:
    return CreditorCandidates(
        candidates=tuple(CreditorCandidate(worker_id=name, free_tokens=1, distance=0) for name in names)
    )


def lends(blocks: int) -> BorrowReply:
    return BorrowReply(grant=grant("c", *range(blocks)))


def asks(question: CreditorQuestion | None) -> tuple[str, int]:
    assert isinstance(question, AskCreditor)
    return question.creditor_id, question.question.blocks


def test_candidates_are_asked_in_order_until_one_grants() -> None:
    search = Borrowing("d", 1, block_tokens=16)
    asked = search.start(4)
    assert isinstance(asked, FindCreditors) and asked.tokens == 64
    assert asks(search.on_candidates(candidates("d", "a", "b"), 0.0)) == ("a", 4)
    assert asks(search.on_reply("a", NO, 0.0)) == ("b", 4)
    assert search.on_reply("b", lends(4), 0.0) is None
    assert search.may_start(0.0)
    search.check_integrity()


def test_a_search_for_a_cache_asks_for_host_memory_only() -> None:
    requests = itertools.count(1)
    sequences = Borrowing("d", 1, 16, requests=requests)
    search = Borrowing("d", 1, 16, requests=requests, for_cache=True)
    sequences.start(1)
    first = sequences.on_candidates(candidates("a"), 0.0)
    asked = search.start(4)
    assert isinstance(asked, FindCreditors) and asked.for_cache
    device = CreditorCandidate(worker_id="a", free_tokens=64, distance=0)
    host = CreditorCandidate(worker_id="b", free_tokens=64, distance=0, tier=KvTier.HOST)
    question = search.on_candidates(CreditorCandidates(candidates=(device, host)), 0.0)
    assert isinstance(question, AskCreditor) and question.creditor_id == "b"
    assert question.question.for_cache and question.question.tier is KvTier.HOST
    assert isinstance(first, AskCreditor) and not first.question.for_cache
    assert (first.question.request, question.question.request) == (1, 2)


def test_after_refusals_the_ledger_is_asked_again_and_told_of_them() -> None:
    search = Borrowing("d", 1, 16, most_rounds=2, rest_s=1.0)
    search.start(4)
    search.on_candidates(candidates("a", "b", "c"), 0.0)
    search.on_reply("a", NO, 0.0)
    search.on_reply("b", None, 0.0)
    again = search.on_reply("c", NO, 0.0)
    assert isinstance(again, FindCreditors) and again.refused_by == ("a", "b", "c")
    assert asks(search.on_candidates(candidates("e"), 0.0)) == ("e", 4)
    assert search.on_reply("e", NO, 5.0) is None
    assert (search.may_start(5.9), search.may_start(6.0)) == (False, True)


def test_each_candidate_is_asked_for_the_tier_that_the_ledger_names() -> None:
    search = Borrowing("d", 1, 16)
    search.start(4)
    named = [("a", KvTier.DEVICE), ("a", KvTier.HOST), ("b", KvTier.HOST)]
    found = tuple(
        CreditorCandidate(worker_id=name, free_tokens=1, distance=0, tier=tier) for name, tier in named
    )
    question = search.on_candidates(CreditorCandidates(candidates=found), 0.0)
    for name, tier in named:
        assert isinstance(question, AskCreditor)
        assert (question.creditor_id, question.question.tier) == (name, tier)
        question = search.on_reply(name, lends(1) if tier is KvTier.HOST and name == "a" else NO, 0.0)
    assert isinstance(question, FindCreditors) and question.tokens == 3 * 16
    assert (question.refused_by, question.refused_host_by) == (("a",), ("a", "b"))


def test_a_search_without_candidates_or_a_ledger_rests() -> None:
    search = Borrowing("d", 1, 16)
    search.start(4)
    with pytest.raises(ValueError, match="looked for"):
        search.start(1)
    assert search.on_candidates(candidates(), 1.0) is None
    assert not search.may_start(1.0)
    search.start(4)
    search.on_no_ledger(2.0)
    assert search.may_start(2.5)


@given(
    wanted=st.integers(1, 20),
    offers=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=3), min_size=1, max_size=6),
    grants=st.lists(st.integers(0, 8), max_size=40),
)
def test_any_search_ends_and_takes_at_most_what_is_wanted(
    wanted: int, offers: list[list[str]], grants: list[int]
) -> None:
    search = Borrowing("d", 1, 16)
    question: CreditorQuestion | None = search.start(wanted)
    got, asked, requests = 0, 0, []
    while question is not None:
        asked += 1
        assert asked < 100
        if isinstance(question, FindCreditors):
            question = search.on_candidates(candidates(*offers.pop() if offers else []), 0.0)
        else:
            requests.append(question.question.request)
            most = question.question.blocks
            granted = min(most, grants.pop() if grants else 0)
            got += granted
            question = search.on_reply(question.creditor_id, lends(granted) if granted else NO, 0.0)
        search.check_integrity()
    assert got <= wanted and search.may_start(1.0)
    assert len(set(requests)) == len(requests)


@pytest.mark.parametrize(
    "granted",
    [
        grant("w", 4),
        grant("c9", 4),
        grant("c1", 4, 4),
        grant("c1", -1),
        grant("c1", 4, 5, 6, 7),
        grant("c1"),
        grant("c1", 4, tier=KvTier.HOST),
        grant("c1", 4, lease_s=float("nan")),
        grant("c1", 4, lease_s=-1.0),
    ],
)
def test_a_grant_that_does_not_fit_the_request_is_ignored(granted: Grant) -> None:
    """A grant of own memory stopped the debtor; a repeated block would hold two sequences."""
    asked = borrow("w", blocks=3)
    assert not is_answer(granted, AskCreditor("c1", asked))
    assert is_answer(grant("c1", 4, 5), AskCreditor("c1", asked))
