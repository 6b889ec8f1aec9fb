"""The backlog: one open question at a time, which names what left; block names are those of the workers."""

from collections.abc import Iterator

import msgspec
import pytest

from services.placement.core.fleet import FleetCapacity
from services.placement.core.packer import Packer
from services.placement.policy import create_packing
from services.placement.policy.fit import WorstFit
from services.scheduler.core.backlog import Backlog
from services.scheduler.core.effects import AskPlacement
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import MOST_KINDS, kinds_of, names_of
from services.scheduler.policy.contract import QueueRule, by_work
from shared.blocks import HASH_BYTES, chain, fingerprint, root
from shared.messages.prefixes import MOST_CHAIN_BLOCKS
from shared.messages.sequence import SequenceRef, pack_tokens
from tests.services.placement.rig import report
from tests.services.scheduler.core.builders import sequence
from tests.services.scheduler.world import small_world
from tests.shared.messages.builders import predicted, ref
from tests.stack.actors import Request
from tests.stack.world import World

RULES = Rules(placement_batch=2, placement_interval_s=0.05)


def test_the_oldest_are_asked_about_first() -> None:
    backlog = Backlog(RULES)
    for name, arrival_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        backlog.add(sequence(name, arrival_s, generated=1))
        backlog.check_integrity()
    question = backlog.ask(("worker-1",), 5.0)
    assert question is not None and question.excluded_workers == ("worker-1",)
    asked = [(item.ref.request_id, item.size_tokens, item.limit_tokens) for item in question.items]
    assert asked == [("a", 5, 24), ("b", 5, 24)]


def test_one_question_is_open_at_a_time_and_the_next_waits_for_the_interval() -> None:
    backlog = Backlog(RULES)
    backlog.add(sequence("a", 0.0, generated=1))
    question = backlog.ask((), 1.0)
    assert question is not None and backlog.ask((), 9.0) is None
    assert [ref.request_id for ref in backlog.close(question.question, more=False, now_s=9.0)] == ["a"]
    assert backlog.ask((), 9.04) is None and backlog.ask((), 9.06) is not None


def test_a_change_while_the_question_is_open_makes_the_next_one_due_at_once() -> None:
    backlog = Backlog(RULES)
    backlog.add(sequence("a", 0.0, generated=1))
    question = backlog.ask((), 1.0)
    assert question is not None
    backlog.poke()
    backlog.close(question.question, more=False, now_s=1.0)
    assert backlog.ask((), 1.0) is not None


def test_an_answer_to_another_question_says_nothing() -> None:
    backlog = Backlog(RULES)
    backlog.add(sequence("a", 0.0, generated=1))
    question = backlog.ask((), 1.0)
    assert question is not None and backlog.close(question.question + 1, more=True, now_s=1.0) == ()
    assert backlog.close(question.question, more=True, now_s=1.0) != ()
    assert backlog.close(question.question, more=True, now_s=1.0) == ()


def _starts(passing_share: float) -> list[str]:
    """Three long answers, then sixty short ones, one by one."""
    backlog = Backlog(Rules(placement_batch=1), QueueRule(by_work, passing_share))
    backlog.queue.on_measured(1e9, 1.0, 1024)
    names = [*(f"long-{n}" for n in range(3)), *(f"short-{n:02}" for n in range(60))]
    waiting = [sequence(name, float(at), generated=1) for at, name in enumerate(names)]
    for one in waiting:
        backlog.add(one)
        backlog.queue.on_predicted(one.key, predicted(8 if one.ref.request_id.startswith("long") else 3))
    by_ref = {one.ref: one for one in waiting}
    order = []
    while len(backlog):
        question = backlog.ask((), 100.0)
        assert question is not None
        (ref,) = backlog.close(question.question, more=True, now_s=100.0)
        backlog.start(by_ref[ref])
        order.append(ref.request_id)
    return order


def test_as_much_passes_as_the_policys_option_says() -> None:
    few, many = _starts(0.0), _starts(0.9)
    assert few.index("long-2") < 30 < many.index("long-2"), (few, many)


WORKERS = ("worker-0", "worker-1")


class Desk:
    """A scheduler's core whose questions to placement are answered by hand."""

    def __init__(self) -> None:
        self.world: World = small_world(workers=2)
        self.world.is_lost = lambda effect: isinstance(effect, AskPlacement)
        self.world.run_for(1.0)

    def questions(self) -> list[AskPlacement]:
        return [effect for effect in self.world.effects if isinstance(effect, AskPlacement)]

    def ask_for(self, name: str) -> Request:
        request = self.world.ask_for(name, prompt_tokens=40, answer_tokens=20, max_tokens=20)
        self.world.run_for(0.02)
        return request

    def leave(self, request: Request) -> None:
        self.world.cancel(request)
        self.world.run_for(0.02)

    def answer(self, *worker_ids: str | None) -> None:
        """The question that is open."""
        self.world.feed("on_placed", self.questions()[-1].question, worker_ids)

    def named(self) -> list[SequenceRef]:
        """By the last question."""
        return list(self.questions()[-1].withdrawn)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.world.core.check_integrity()


def test_one_that_left_while_it_was_asked_for_is_named_once(desk: Desk) -> None:
    desk.leave(desk.ask_for("a"))
    desk.answer("worker-0")
    assert len(desk.questions()) == 1, "nobody else waits"
    desk.ask_for("b")
    assert [item.ref for item in desk.questions()[-1].items] == [ref("b")] and desk.named() == [ref("a")]
    desk.answer(None)
    desk.world.run_for(0.1)
    assert len(desk.questions()) == 3 and desk.named() == []


def test_one_that_left_while_it_waited_on_after_an_answer_is_named(desk: Desk) -> None:
    first = desk.ask_for("a")
    desk.answer(None)
    desk.leave(first)
    desk.ask_for("b")
    assert ref("a") in [named for question in desk.questions() for named in question.withdrawn]


def test_one_that_began_or_was_never_asked_for_is_not_named(desk: Desk) -> None:
    first, second = desk.ask_for("a"), desk.ask_for("b")
    desk.leave(second)
    desk.answer("worker-0")
    desk.world.until(lambda: len(first.tokens) > 3, limit_s=2.0)
    desk.leave(first)
    desk.ask_for("c")
    assert [named for question in desk.questions() for named in question.withdrawn] == []


@pytest.mark.parametrize("policy", ["worst_fit", "mell"])
def test_its_place_is_free_for_the_next_in_the_same_moment(desk: Desk, policy: str) -> None:
    """Two workers with room for one of them each. The clock stands still: nothing expires."""
    fleet = FleetCapacity()
    packer = Packer(lambda capacity: create_packing("mell", capacity)) if policy == "mell" else None
    for name in WORKERS:
        fleet.on_reported(report(name, total=5), 0.0)

    def place() -> tuple[str | None, ...]:
        asked = desk.questions()[-1]
        fleet.on_withdrawn(asked.withdrawn)
        if packer is None:
            return fleet.place(asked.items, frozenset(), WorstFit(), 0.0)
        packer.on_withdrawn(asked.withdrawn)
        return packer.place(asked.items, frozenset(), fleet, 0.0)

    for name in ("a", "b", "c", "d"):
        request = desk.ask_for(name)
        home = place()
        assert home[0] in WORKERS, name
        desk.leave(request)
        desk.answer(*home)
        fleet.check_integrity()


PRINT = fingerprint(model="m", dtype="float32", layout="l", block_tokens=2)


def test_workers_of_one_kind_share_a_chain_and_others_have_none() -> None:
    plain = report("w0")
    kinds = kinds_of(
        [plain, *(msgspec.structs.replace(plain, fingerprint=PRINT, caches_prefixes=True) for _ in range(2))]
    )
    assert kinds == ((PRINT, plain.block_tokens),)
    many = [msgspec.structs.replace(plain, fingerprint=bytes([n]), caches_prefixes=True) for n in range(1, 9)]
    assert len(kinds_of(many)) == MOST_KINDS and kinds_of(many) == kinds_of(many[::-1])


def test_a_chain_names_the_whole_blocks_of_the_prompt_under_its_salt() -> None:
    waiting = sequence("a", 0.0, generated=1)
    assert waiting.spec is not None
    (names,) = names_of(waiting, ((PRINT, 2),))
    assert names.block_tokens == 2 and names.names == b"".join(chain(root(PRINT), waiting.spec.prompt, 2))
    waiting.spec = msgspec.structs.replace(waiting.spec, cache_salt=b"tenant")
    assert names_of(waiting, ((PRINT, 2),)) == (names,), "computed once"
    (salted,) = names_of(waiting, ((PRINT, 4),))
    assert salted.names == b"".join(chain(root(PRINT, b"tenant"), waiting.spec.prompt, 4))


def test_names_are_bounded_and_need_a_prompt() -> None:
    waiting = sequence("a", 0.0, generated=1)
    assert waiting.spec is not None
    waiting.spec = msgspec.structs.replace(waiting.spec, prompt=pack_tokens(range(5000)))
    (names,) = names_of(waiting, ((PRINT, 2),))
    assert len(names.names) == MOST_CHAIN_BLOCKS * HASH_BYTES and names_of(waiting, ()) == ()
    waiting.spec = None
    assert names_of(waiting, ((PRINT, 2),)) == ()
