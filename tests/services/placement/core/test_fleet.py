"""The memory of a fleet of workers, driven step by step and by random histories."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.fleet import FleetCapacity
from services.placement.core.seats import PASSED_S
from services.placement.policy import POLICIES
from services.placement.policy.contract import PlacementPolicy
from services.placement.policy.fit import WorstFit
from shared.blocks import HASH_BYTES
from shared.messages.commands import Crowd, PlacementItem, WaitingAhead
from shared.messages.plans import EndedSequence
from shared.messages.prefixes import PrefixChain
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import FinishReason
from tests.services.placement.rig import BLOCK, item, listed, report, stepped
from tests.shared.messages.builders import ref


def place(
    fleet: FleetCapacity, *items: PlacementItem, excluded: tuple[str, ...] = (), now_s: float = 0.0
) -> list[str | None]:
    answer = list(fleet.place(items, frozenset(excluded), WorstFit(), now_s))
    fleet.check_integrity()
    return answer


def fleet_of(*reports: WorkerReported) -> FleetCapacity:
    fleet = FleetCapacity()
    for one in reports:
        fleet.on_reported(one, 0.0)
    return fleet


def test_excluded_and_silent_workers_take_nothing() -> None:
    fleet = fleet_of(report("w0"), report("w1"))
    assert place(fleet, *map(item, "abcd")) == ["w0", "w1", "w0", "w1"], "reservations count at once"
    assert place(fleet, item("e"), excluded=("w0",)) == ["w1"]
    assert place(fleet, item("f"), excluded=("w0", "w1")) == [None]
    assert place(fleet, item("g"), now_s=2.1) == [None] and not fleet.workers


def test_who_has_left_the_bus_takes_nothing_from_then_on() -> None:
    left = report("w0")
    fleet = fleet_of(left, report("w1"))
    assert not fleet.on_gone("w0", left.incarnation + 1), "another start of it"
    assert place(fleet, item("a"), excluded=("w1",)) == ["w0"]
    assert fleet.on_gone("w0", left.incarnation) and not fleet.on_gone("w0", left.incarnation)
    assert place(fleet, item("b"), item("c")) == ["w1", "w1"] and fleet.on_tick(0.1) == []


def test_what_left_before_its_start_holds_no_place() -> None:
    fleet = fleet_of(report("w0", total=4))
    assert place(fleet, item("a", size=3 * BLOCK, attempt=2)) == ["w0"]
    fleet.on_withdrawn([ref("a", 1), ref("b", 9)])
    assert place(fleet, item("c", size=3 * BLOCK)) == [None], "a higher attempt of it has come since"
    fleet.on_withdrawn([ref("a", 2)])
    assert place(fleet, item("c", size=3 * BLOCK)) == ["w0"]


@pytest.mark.parametrize(
    ("resident", "size", "total", "home"),
    [
        (listed("old", blocks=2), 2 * BLOCK, 4, None),  # it needs room to grow
        (listed("old", blocks=2), BLOCK, 4, "w0"),
        (listed("old", prompt=64, blocks=4), 1, 4, None),
        (None, 4 * BLOCK, 4, "w0"),  # an empty worker takes whatever it admits
        (None, 4 * BLOCK + 1, 4, None),
        (listed("old", prompt=6 * BLOCK, blocks=0, state=SequenceState.WAITING), 2 * BLOCK, 8, None),
        (listed("old", prompt=6 * BLOCK, blocks=0, state=SequenceState.WAITING), BLOCK, 8, "w0"),
    ],
)
def test_a_sequence_needs_its_memory_and_room_to_grow(
    resident: SequenceReport | None, size: int, total: int, home: str | None
) -> None:
    """A preempted resident without its memory counts too."""
    here = () if resident is None else (resident,)
    assert place(fleet_of(report("w0", total=total, sequences=here)), item("a", size=size)) == [home]


@pytest.mark.parametrize(("waited_s", "small"), [(0.0, "w0"), (PASSED_S - 0.1, "w0"), (PASSED_S, None)])
def test_a_small_one_passes_one_without_room_but_not_for_ever(waited_s: float, small: str | None) -> None:
    """A long prompt at the head held back all that would have fitted, for as long as memory was short; now
    it is passed for a while, and not for ever."""
    fleet = fleet_of(report("w0", total=8, sequences=(listed("old", blocks=1),)))
    big = item("big", size=7 * BLOCK, limit=7 * BLOCK, waited_s=waited_s)
    assert place(fleet, big, item("small", size=1)) == [None, small]


def test_a_few_may_wait_where_there_is_no_memory_and_go_where_fewest_do() -> None:
    """Else a worker runs dry whenever something ends, until placement has heard of it and answered."""
    full = listed("old", prompt=8 * BLOCK, blocks=8)
    fleet = fleet_of(report("w0", total=8, sequences=(full,)), report("w1", total=8, sequences=(full,)))
    crowd = Crowd(worker_id="w0", places=1, tokens=3 * BLOCK)
    asked = tuple(item(name, size=2 * BLOCK) for name in "abcd")
    answers = fleet.place(asked, frozenset(), WorstFit(), 0.0, WaitingAhead(places=2, crowds=(crowd,)))
    assert answers == ("w1", "w1", "w0", None)


def test_what_waits_at_a_worker_has_its_memory_promised() -> None:
    fleet = fleet_of(report("w0", total=8, sequences=(listed("old", blocks=1),)))
    ahead = WaitingAhead(crowds=(Crowd(worker_id="w0", places=0, tokens=6 * BLOCK),))
    assert fleet.place((item("a", size=BLOCK),), frozenset(), WorstFit(), 0.0, ahead) == (None,)
    assert fleet.place((item("a", size=BLOCK),), frozenset(), WorstFit(), 0.0) == ("w0",)


def test_item_larger_than_every_worker_holds_nobody_up() -> None:
    fleet = fleet_of(report("w0", total=8))
    assert place(fleet, item("huge", size=10, limit=9 * BLOCK), item("small", limit=BLOCK)) == [None, "w0"]


def test_reservation_lasts_until_a_heartbeat_lists_it_or_it_expires() -> None:
    fleet = fleet_of(report("w0", total=4))
    asked = item("a", size=3 * BLOCK, limit=4 * BLOCK)
    assert place(fleet, asked) == place(fleet, asked) == ["w0"], "asking again replaces the reservation"
    fleet.on_reported(report("w0", total=4, seq=2), 0.25)
    assert place(fleet, item("b", size=1), now_s=0.25) == [None]
    fleet.on_reported(report("w0", total=4, seq=3, sequences=(listed("a", prompt=16, blocks=1),)), 0.5)
    assert place(fleet, item("b", size=1), now_s=0.5) == ["w0"]
    fleet.on_reported(report("w0", total=4, seq=4), 6.0)
    fleet.on_tick(6.0)
    assert not fleet.workers["w0"].reservations


@pytest.mark.parametrize(("known_seq", "free"), [(7, 4), (9, 1)])
def test_an_end_frees_memory_before_the_next_heartbeat(known_seq: int, free: int) -> None:
    """It counts once, and not at all if the heartbeat knew of it."""
    here = (listed("old", prompt=48, blocks=3),)
    fleet = fleet_of(report("w0", total=4, sequences=here, stepped_seq=known_seq))
    assert place(fleet, item("a", size=2 * BLOCK)) == [None]
    over = EndedSequence(ref=ref("old"), finish_reason=FinishReason.STOP, generated_tokens=3)
    for seq in (8, 9):
        fleet.on_stepped(stepped("w0", seq, over))
        assert fleet.workers["w0"].free_blocks == free


def test_old_heartbeats_are_ignored_and_a_new_incarnation_starts_afresh() -> None:
    fleet = fleet_of(report("w0", total=8, seq=5))
    place(fleet, item("a", size=4 * BLOCK, limit=8 * BLOCK))
    fleet.on_reported(report("w0", total=2, seq=4), 0.1)
    assert fleet.workers["w0"].report.capacity.total_blocks == 8
    fleet.on_reported(report("w0", total=8, seq=1, incarnation=2), 0.2)
    assert not fleet.workers["w0"].reservations
    fleet.on_reported(report("w0", total=2, seq=9, incarnation=1), 0.3)
    assert fleet.workers["w0"].report.capacity.total_blocks == 8


@dataclass
class SimulatedWorker:
    """Does what a real worker does with what it is given: starts late, grows, ends."""

    worker_id: str
    total: int
    running: dict[str, int] = field(default_factory=dict)
    arriving: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    stepped_seq: int = 0

    def heartbeat(self) -> WorkerReported:
        self.seq += 1
        sequences = tuple(listed(r, prompt=s, blocks=-(-s // BLOCK)) for r, s in self.running.items())
        return report(
            self.worker_id, total=self.total, sequences=sequences, seq=self.seq, stepped_seq=self.stepped_seq
        )

    def used(self) -> int:
        return sum(-(-size // BLOCK) for size in (*self.running.values(), *self.arriving.values()))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(POLICIES)))
def test_never_above_capacity_whatever_happens(seed: int, name: str) -> None:
    rng, policy, fleet = random.Random(seed), POLICIES[name](), FleetCapacity()
    workers = {f"w{i}": SimulatedWorker(f"w{i}", rng.randint(2, 40)) for i in range(rng.randint(1, 4))}
    largest = max(w.total for w in workers.values()) * BLOCK
    count, now_s = 0, 0.0
    for worker in workers.values():
        fleet.on_reported(worker.heartbeat(), now_s)
    for _ in range(80):
        now_s += rng.uniform(0.0, 0.05)
        act = rng.choice(["place", "start", "end", "beat"])
        worker = workers[rng.choice(sorted(workers))]
        if act == "place":
            sizes = [rng.randint(1, largest) for _ in range(rng.randint(1, 5))]
            items = tuple(
                item(f"r{count + i}", size, size, prefixes=_chains(rng), waited_s=rng.choice((0.0, PASSED_S)))
                for i, size in enumerate(sizes)
            )
            count += len(items)
            answers = _placed(fleet, items, policy, now_s)
            for one, chosen in zip(items, answers, strict=True):
                if chosen is not None:
                    workers[chosen].arriving[one.ref.request_id] = one.size_tokens
                    assert workers[chosen].used() <= workers[chosen].total
        elif act == "start":
            worker.running |= worker.arriving
            worker.arriving.clear()
        elif act == "end" and worker.running:
            over = rng.choice(sorted(worker.running))
            del worker.running[over]
            worker.stepped_seq += 1
            end = EndedSequence(ref=ref(over), finish_reason=FinishReason.STOP, generated_tokens=1)
            fleet.on_stepped(stepped(worker.worker_id, worker.stepped_seq, end))
        for each in workers.values():  # nobody falls silent here
            if act == "beat" or fleet.liveness.unheard_s(each.worker_id, now_s) > 1.0:
                fleet.on_reported(each.heartbeat(), now_s)
        fleet.check_integrity()


def _chains(rng: random.Random) -> tuple[PrefixChain, ...]:
    """One of a few prompts, so that what was placed before draws what comes."""
    name = rng.randrange(4).to_bytes(HASH_BYTES, "big")
    return rng.choice([(), (PrefixChain(block_tokens=BLOCK, names=name),)])


def _placed(
    fleet: FleetCapacity, items: tuple[PlacementItem, ...], policy: PlacementPolicy, now_s: float
) -> tuple[str | None, ...]:
    rooms = [worker.report for worker in fleet.workers.values()]
    admitted = [any(one.limit_tokens <= room.max_context_tokens for room in rooms) for one in items]
    empties = [w.report for w in fleet.workers.values() if not w.residents and not w.reservations]
    answers = fleet.place(items, frozenset(), policy, now_s)
    is_held_up = False
    for one, chosen, could in zip(items, answers, admitted, strict=True):
        if is_held_up:
            assert chosen is None, "overtaken"
        elif chosen is None and could:
            is_held_up = one.waited_s >= PASSED_S
            taken = {name for name, worker in fleet.workers.items() if worker.reservations}
            free = [room for room in empties if room.worker_id not in taken]
            assert not any(one.limit_tokens <= room.max_context_tokens for room in free)
    return answers


def test_each_choice_is_told_with_what_the_others_would_have_cost() -> None:
    fleet = fleet_of(report("w0"), report("w1"))
    items = (item("a"), item("b"))
    assert fleet.place(items, frozenset(), POLICIES["prefix_aware"](), 0.0) == ("w0", "w1")
    first, second = fleet.choices
    assert (first.item, first.worker_id, first.expected_tokens) == (items[0], "w0", 0)
    assert [name for name, _ in second.costs_s] == ["w1", "w0"], "the cheapest first"


@pytest.mark.parametrize(
    ("policy", "worker", "expected"), [("worst_fit", "w0", 0), ("prefix_aware", "w1", BLOCK)]
)
def test_without_room_it_waits_where_its_beginning_is(policy: str, worker: str, expected: int) -> None:
    """If the policy looks at that."""
    names = PrefixChain(block_tokens=BLOCK, names=bytes(range(HASH_BYTES)))
    held = {name: (listed(name, blocks=8),) for name in ("w0", "w1")}
    fleet = fleet_of(*(report(name, total=8, free=0, sequences=held[name]) for name in held))
    fleet.prefixes.expect("w1", (names,), 0.0)
    asked = item("a", size=BLOCK, prefixes=(names,))
    placed = fleet.place((asked,), frozenset(), POLICIES[policy](), 0.0, WaitingAhead(places=2))
    assert placed == (worker,) and [choice.expected_tokens for choice in fleet.choices] == [expected]


def test_what_is_pending_at_a_worker_is_computed_meanwhile() -> None:
    fleet = fleet_of(report("w0"))
    fleet.place((item("a", size=400),), frozenset(), POLICIES["prefix_aware"](), 1.0)
    worker = fleet.workers["w0"]
    assert [worker.pending_tokens(at_s) for at_s in (1.0, 1.0625, 2.0)] == [400, 150, 0]
