"""What placement makes of news: counted from the beginning, by tier, with gaps asked for."""

from services.placement.core.prefix_index import NOTHING, PrefixIndex
from shared.messages.prefixes import MOST_CHAIN_BLOCKS
from tests.services.placement.rig import chain, news


def test_a_prompt_is_counted_from_its_beginning_by_tier() -> None:
    index = PrefixIndex()
    index.on_news(news(1, 1, 2, 3, 5, tiers=bytes([0, 1, 2, 0])))
    assert index.cached("w0", [chain(1, 2, 3, 4, 5)], 0.0) == (16, 16, 16)
    assert index.cached("w0", [chain(4, 1)], 0.0) == NOTHING
    assert index.cached("w1", [chain(1)], 0.0) == NOTHING
    assert index.cached("w0", [], 0.0) == NOTHING
    assert index.cached("w0", [chain(9), chain(1, block_tokens=32)], 0.0) == (32, 0, 0)


def test_a_gap_is_asked_for_again_and_again_and_later_news_wait() -> None:
    index = PrefixIndex(retry_s=0.5)
    index.on_news(news(1, 1))
    index.on_news(news(3, 3, removed=(1,)))
    assert index.cached("w0", [chain(1)], 0.0) == (16, 0, 0), "not before what came in between"
    ((worker, question),) = index.questions(1.0)
    assert (worker, question.since_seq, question.incarnation) == ("w0", 1, 1)
    assert not list(index.questions(1.4))
    assert len(list(index.questions(1.5))) == 1
    index.on_answer(news(0, 7, full=True))
    assert index.blocks("w0") == 1, "an old answer changes nothing"
    index.on_answer(news(2, 2))
    assert not list(index.questions(9.0))
    assert index.cached("w0", [chain(2)], 0.0) == index.cached("w0", [chain(3)], 0.0) == (16, 0, 0)
    assert index.cached("w0", [chain(1)], 0.0) == NOTHING
    index.check_integrity()


def test_a_reader_that_starts_late_asks_for_everything() -> None:
    index = PrefixIndex()
    index.on_news(news(40, 1))
    ((_, question),) = index.questions(0.0)
    assert question.since_seq == 0
    index.on_answer(news(41, 1, 2, full=True))
    assert index.blocks("w0") == 2
    index.on_news(news(42, removed=(1, 2)))
    assert index.blocks("w0") == 0


def test_a_worker_that_is_heard_of_is_asked_once() -> None:
    index = PrefixIndex(retry_s=0.5)
    index.expect("w0", [chain(9)], 0.0)
    assert not list(index.questions(0.0)), "nobody is heard of"
    index.on_worker("w0", 3)
    assert [(q.incarnation, q.since_seq) for _, q in index.questions(0.0)] == [(3, 0)]
    index.on_answer(news(0, full=True, incarnation=3))
    index.on_worker("w0", 3)
    assert not list(index.questions(9.0))
    assert index.cached("w0", [chain(9)], 1.0) == (16, 0, 0), "what was expected still is"
    index.on_news(news(1, 4, incarnation=3))
    assert index.blocks("w0") == 1


def test_a_new_incarnation_has_nothing_and_an_old_one_is_not_listened_to() -> None:
    index = PrefixIndex()
    index.on_news(news(1, 1, 2, incarnation=5))
    index.on_worker("w0", 6)
    index.on_news(news(1, 3, incarnation=6))
    index.on_news(news(2, 4, incarnation=5))
    index.on_answer(news(9, 4, full=True, incarnation=5))
    assert index.blocks("w0") == 1
    index.forget("w0")
    assert index.blocks("w0") == 0


def test_what_was_placed_is_expected_for_a_while() -> None:
    index = PrefixIndex(expect_s=5.0)
    index.expect("w0", [chain(1, 2)], 0.0)
    assert index.cached("w0", [chain(1, 2, 3)], 4.0) == (32, 0, 0)
    index.on_news(news(1, 1))
    assert index.cached("w0", [chain(1, 2, 3)], 4.0) == (32, 0, 0), "news that came early change nothing"
    index.on_tick(5.0)
    assert index.cached("w0", [chain(1, 2, 3)], 5.0) == (16, 0, 0)
    index.check_integrity()


def test_everything_is_bounded() -> None:
    index = PrefixIndex()
    long = chain(*range(2000))
    for number in range(80):
        index.expect("w0", [chain(*range(number * 256, number * 256 + 300))], 0.0)
        index.on_news(news(2 + number, number))
        index.check_integrity()
    assert sum(index.cached("w0", [long], 0.0)) <= MOST_CHAIN_BLOCKS * 16
