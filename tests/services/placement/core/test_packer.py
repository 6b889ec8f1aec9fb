"""A packing policy that follows heartbeats: random fleets, moves that fail, workers that die."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.fleet import FleetCapacity
from services.placement.core.packer import Packer, PackingRules
from services.placement.policy import LIVE_PACKINGS, create_packing
from shared.messages.moves import SequenceMove, SequenceMoved
from shared.messages.plans import EndedSequence
from shared.messages.reports import SequenceReport, WorkerReported
from shared.messages.sequence import FinishReason
from tests.services.placement.rig import BLOCK, item, listed, report, stepped
from tests.shared.messages.builders import ref

TOTAL = 100
EPOCH_S = 0.5
RULES = PackingRules(share=0.8, most_sequences=16, patience_s=2.0, move_patience_s=4.0, calm_s=1.0)


@dataclass
class Running:
    worker: str
    attempt: int
    blocks: int


@dataclass
class Rig:
    """Workers as they are, and a packer that only hears of them."""

    policy: str = "mell"
    workers: int = 6
    now_s: float = 0.0
    running: dict[str, Running] = field(default_factory=dict)
    beats: int = 0
    incarnations: dict[str, int] = field(default_factory=dict)
    orders: list[SequenceMove] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.packer = Packer(lambda capacity: create_packing(self.policy, capacity), RULES)
        self.fleet = FleetCapacity()
        for number in range(self.workers):
            self.incarnations[f"w{number}"] = 1
        self.beat()

    def beat(self) -> None:
        """A heartbeat of everybody."""
        self.beats += 1
        for name, incarnation in self.incarnations.items():
            self.fleet.on_reported(self.report(name, incarnation), self.now_s)
        self.fleet.on_tick(self.now_s)

    def report(self, name: str, incarnation: int) -> WorkerReported:
        here: tuple[SequenceReport, ...] = tuple(
            listed(request, prompt=(one.blocks - 1) * BLOCK or 1, blocks=one.blocks, attempt=one.attempt)
            for request, one in self.running.items()
            if one.worker == name
        )
        return report(name, total=TOTAL, sequences=here, seq=self.beats, incarnation=incarnation)

    def arrive(self, request: str, blocks: int) -> str | None:
        """Placed and running at once, or not at all."""
        asked = item(request, size=blocks * BLOCK, limit=blocks * BLOCK)
        (worker,) = self.packer.place((asked,), frozenset(), self.fleet, self.now_s)
        if worker is not None:
            self.running[request] = Running(worker, 1, blocks)
        self.packer.check_integrity()
        return worker

    def end(self, request: str, *, attempt: int | None = None) -> None:
        """It ends, and its worker's step report says so. `attempt`: only that earlier one does."""
        running = self.running[request]
        over = ref(request, running.attempt if attempt is None else attempt)
        if over.attempt == running.attempt:
            del self.running[request]
        end = EndedSequence(ref=over, finish_reason=FinishReason.STOP, generated_tokens=1)
        event = stepped(running.worker, self.beats, end)
        self.fleet.on_stepped(event)
        self.packer.on_stepped(event)
        self.packer.check_integrity()

    def epoch(self) -> tuple[SequenceMove, ...]:
        self.now_s += EPOCH_S
        self.beat()
        orders = self.packer.on_epoch(self.fleet, self.now_s)
        self.packer.check_integrity()
        for order in orders:
            running = self.running[order.ref.request_id]
            assert running.worker != order.target, "it is there already"
            assert running.attempt == order.ref.attempt and order.target in self.incarnations
        return orders

    def carry_out(self, order: SequenceMove, reason: str = "") -> str | None:
        """Where placement says it belongs, when it is told of the new attempt."""
        told: str | None = None
        running = self.running.get(order.ref.request_id)
        source = running.worker if running else "w?"
        if running is not None and not reason:
            running.worker, running.attempt = order.target, running.attempt + 1
            asked = item(order.ref.request_id, size=running.blocks * BLOCK, attempt=running.attempt)
            (told,) = self.packer.place((asked,), frozenset(), self.fleet, self.now_s)
        moved = SequenceMoved(ref=order.ref, source=source, target=order.target, reason=reason)
        self.packer.on_moved(moved, self.now_s)
        self.packer.check_integrity()
        return told

    def used(self) -> set[str]:
        return {one.worker for one in self.running.values()}


def settle(rig: Rig, epochs: int = 8) -> None:
    """Epochs in which every order is carried out at once."""
    for _ in range(epochs):
        for order in rig.epoch():
            assert rig.carry_out(order) == order.target, "the books know of the move"


def spread(workers: int) -> Rig:
    """Sequences found running, one on each of the first workers."""
    rig = Rig()
    for number in range(workers):
        rig.running[f"r{number}"] = Running(f"w{number}", 1, 20)
    return rig


def test_spread_sequences_end_up_on_few_workers() -> None:
    rig = spread(6)
    settle(rig)
    assert len(rig.used()) == 2
    idle = rig.packer.idle_workers(rig.fleet)
    assert len(idle) == 4 and rig.packer.state_of(idle[0]) == "idle"
    assert {rig.packer.state_of(name) for name in rig.used()} <= {"T", "S", "M", "L"}


def test_arrivals_fill_a_worker_and_leave_it_when_another_grows() -> None:
    rig = Rig()
    homes = [rig.arrive(f"r{number}", 15) for number in range(5)]
    assert len(set(homes)) == 1 and rig.arrive("r5", 15) not in {None, homes[0]}
    rig.running["r0"].blocks = 45
    orders = rig.epoch()
    assert orders and all(order.ref.request_id != "r0" for order in orders)
    assert rig.packer.counts["ordered"] == len(orders)


def test_what_ended_frees_its_place_before_any_heartbeat_or_epoch() -> None:
    rig = Rig(workers=1)
    homes = [rig.arrive(f"r{number}", 30) for number in range(3)]
    assert homes == ["w0", "w0", None]
    rig.end("r0")
    assert rig.arrive("r2", 30) == "w0"


def test_the_end_of_an_attempt_that_was_replaced_frees_nothing() -> None:
    """The source of a move ends what the target runs on."""
    rig = Rig(workers=1)
    rig.arrive("r0", 60)
    rig.running["r0"].attempt = 2
    rig.packer.place((item("r0", size=60 * BLOCK, attempt=2),), frozenset(), rig.fleet, rig.now_s)
    rig.end("r0", attempt=1)
    assert rig.arrive("r1", 60) is None
    rig.end("r0")
    assert rig.arrive("r1", 60) == "w0"


def test_what_left_before_its_start_gives_its_place_up_unless_it_was_seen() -> None:
    rig = Rig(workers=1)
    asked = item("r0", size=60 * BLOCK, attempt=2)
    assert rig.packer.place((asked,), frozenset(), rig.fleet, rig.now_s) == ("w0",)
    rig.packer.on_withdrawn([ref("r0", 1), ref("r9")])
    assert rig.arrive("r1", 60) is None, "a higher attempt of it has come since"
    rig.packer.on_withdrawn([ref("r0", 2)])
    rig.fleet.on_withdrawn([ref("r0", 2)])
    assert rig.arrive("r1", 60) == "w0"
    rig.beat()
    rig.epoch()
    rig.packer.on_withdrawn([ref("r1")])
    assert rig.arrive("r2", 60) is None, "it runs: its end will be told"


def test_a_failed_order_is_repeated_after_a_pause() -> None:
    rig = spread(2)
    (order,) = rig.epoch()
    assert rig.epoch() == (), "given once"
    rig.carry_out(order, reason="no room")
    assert rig.packer.counts["failed"] == 1
    assert {rig.packer.state_of(name) for name in ("w0", "w1")} == {"T"}, "one on each, as it is"
    first = rig.epoch()
    assert order.ref not in {other.ref for other in first}, "left alone for a while"
    for other in first:
        rig.carry_out(other, reason="no room")
    assert any(rig.epoch() for _ in range(6)), "never tried again"


def test_a_worker_that_is_retired_gets_nothing_until_it_comes_anew() -> None:
    rig = Rig(workers=2)
    rig.packer.sync(rig.fleet)
    rig.packer.retire("w0", rig.fleet)
    assert [rig.arrive(f"r{number}", 30) for number in range(3)] == ["w1", "w1", None]
    assert rig.packer.wanting(rig.now_s) == 1 and rig.packer.wanting(rig.now_s + 5) == 0
    assert rig.packer.state_of("w0") == "retired"
    rig.incarnations["w0"] = 2
    rig.beat()
    assert rig.arrive("r9", 30) == "w0"


def test_a_sequence_larger_than_all_workers_holds_up_no_other() -> None:
    rig = Rig(workers=1)
    huge, small = item("huge", size=5000, limit=9000), item("small", size=16, limit=16)
    assert rig.packer.place((huge, small), frozenset(), rig.fleet, 0.0) == (None, "w0")


def test_an_excluded_home_is_left_for_an_idle_worker_or_one_that_serves_others() -> None:
    rig = Rig(workers=2)
    home = rig.arrive("r", 10)
    assert home is not None
    without, busy = frozenset({home}), next(name for name in rig.fleet.workers if name != home)
    for request, size in (("s", 320), ("t", 480), ("r", 160)):
        asked = item(request, size=size, attempt=2)
        assert rig.packer.place((asked,), without, rig.fleet, 0.0) == (busy,)


happenings = st.lists(
    st.tuples(st.sampled_from("aaaagggeesmfdxr"), st.integers(0, 10**6), st.integers(1, 40)), max_size=60
)


@settings(max_examples=80)
@given(happenings, st.sampled_from(LIVE_PACKINGS), st.integers(1, 6))
def test_the_books_hold_and_settle(history: list[tuple[str, int, int]], policy: str, workers: int) -> None:
    rig = Rig(policy, workers)
    pending: list[SequenceMove] = []
    for number, (what, which, blocks) in enumerate(history):
        names = sorted(rig.running)
        name = names[which % len(names)] if names else ""
        if what == "a":
            rig.arrive(f"r{number}", blocks)
        elif what == "g" and name:
            rig.running[name].blocks = min(TOTAL, rig.running[name].blocks + blocks)
        elif what == "e" and name:
            del rig.running[name]
        elif what == "s" and name:
            rig.end(name)
        elif what in "mf" and pending:
            order = pending.pop(which % len(pending))
            at_home = rig.running.get(order.ref.request_id)
            stale = at_home is None or at_home.attempt != order.ref.attempt
            rig.carry_out(order, "failed" if what == "f" or stale else "")
        elif what == "d":
            dead = sorted(rig.incarnations)[which % workers]
            rig.incarnations[dead] += 1
            rig.running = {key: one for key, one in rig.running.items() if one.worker != dead}
        elif what == "x":
            rig.running[f"x{number}"] = Running(sorted(rig.incarnations)[which % workers], 1, min(blocks, 20))
        else:
            pending += rig.epoch()
    rig.now_s += 10
    settle(rig, epochs=10)
    rig.running.clear()
    for _ in range(6):
        rig.epoch()
    rig.now_s += RULES.move_patience_s
    rig.epoch()
    assert rig.packer.idle_workers(rig.fleet) == sorted(rig.incarnations), "all are to spare again"


def test_histories_of_many_sequences_use_few_workers() -> None:
    """MELL on live books against worst fit's spread: at most the bound and two more."""
    dice = random.Random(3)
    rig = Rig(workers=24)
    worst = 0.0
    for number in range(400):
        rig.arrive(f"r{number}", dice.randint(3, 25))
        for key in [key for key in rig.running if dice.random() < 0.06]:
            del rig.running[key]
        for one in rig.running.values():
            one.blocks = min(40, one.blocks + (dice.random() < 0.2))
        for order in rig.epoch():
            rig.carry_out(order)
        volume = sum(max(5, one.blocks + 1) for one in rig.running.values())
        worst = max(worst, len(rig.used()) - 4 / 3 * -(-volume // 80))
    assert worst <= 6
