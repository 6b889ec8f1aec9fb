"""Running sequences are copied to another worker where that pays; should theirs die, it has most of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.scheduler.core import shadowing
from services.scheduler.core.effects import AskPull
from services.scheduler.core.rules import Rules
from services.scheduler.core.shadowing import Shadowing
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.reports import SequenceState
from shared.messages.sequence import SequenceRef
from tests.services.scheduler.core.builders import sequence
from tests.services.scheduler.world import SMALL, small_world
from tests.shared.messages.builders import sequence_report, worker_report
from tests.stack.actors import Request
from tests.stack.world import World

BLOCK = 4
LOST_S = 0.25
"""Between two heartbeats; what came after the last one nobody knew of."""
PROMPT, ANSWER = 120, 200
RULES = replace(SMALL, shadow_from_s=0.05)
MEASURED = {"prefill_tokens_per_s": 1000.0, "decode_step_s": 0.01}


def world_of(workers: int = 2, rules: Rules = RULES, **kinds: Any) -> World:
    kinds = {"cached": True, "host_blocks": 400, "kv_blocks": 256, "says": MEASURED, **kinds}
    world = small_world(rules=rules, workers=workers, **kinds)
    for tiers in world.tiers.values():
        tiers._faults, tiers._copies_s = 0.0, (0.001,)  # What copies from the host bring is asserted.
    return world


def begun(world: World, *, count: int = 1, prompt: int = PROMPT) -> list[Request]:
    requests = [world.ask_for(f"r{number}", prompt, ANSWER, ANSWER + 10) for number in range(count)]
    world.until(lambda: all(len(request.tokens) > 2 for request in requests), limit_s=20)
    return requests


def orders(world: World) -> list[PullBlocks]:
    pulls = [effect.order for effect in world.effects if isinstance(effect, AskPull)]
    assert all(order.is_shadow for order in pulls)
    return pulls


def shadows(world: World, name: str) -> int:
    return len(world.caches[name].shadows)


def other(world: World, request: Request) -> str:
    source = world.worker_of(request)
    return next(name for name in world.workers if name != source)


def finish(world: World) -> None:
    world.until(lambda: not world.unfinished(), limit_s=60)
    for request in world.requests:
        assert request.tokens == request.expected


def test_the_next_worker_computes_what_was_not_copied_and_no_more() -> None:
    world = world_of()
    (request,) = begun(world)
    keeper = other(world, request)
    world.until(lambda: shadows(world, keeper) >= PROMPT // BLOCK + 10, limit_s=10)
    computed = sum(count for count, _ in world.workers[keeper].step_tokens)
    source = world.worker_of(request)
    assert source is not None and computed == 0
    told = len(request.tokens)
    world.kill(world.workers[source], 30.0)
    world.until(lambda: len(request.tokens) > told + 3, limit_s=20)
    assert world.worker_of(request) == keeper
    computed = sum(count for count, _ in world.workers[keeper].step_tokens)
    lag_tokens = (2 * shadowing.INTERVAL_S + LOST_S) / MEASURED["decode_step_s"]
    assert computed < lag_tokens and world.caches[keeper].counts["hits_host"] >= PROMPT // BLOCK + 10
    finish(world)


def test_it_is_followed_and_renewed_and_forgotten() -> None:
    world = world_of()
    (request,) = begun(world)
    keeper = other(world, request)
    world.until(lambda: len(request.tokens) > ANSWER // 2, limit_s=20)
    held = shadows(world, keeper)
    assert held >= (PROMPT + ANSWER // 3) // BLOCK
    finish(world)
    world.run_for(3.0)
    asked = len(orders(world))
    world.run_for(20.0)
    assert len(orders(world)) == asked and world.core.describe()["shadowed"] == 0
    assert shadows(world, keeper) > 0, "it is cache now, and goes first"


@pytest.mark.parametrize(
    ("rules", "prompt", "kinds"),
    [
        (replace(SMALL, shadow_from_s=0.0), PROMPT, {}),
        (replace(SMALL, shadow_from_s=0.6), PROMPT, {}),
        (RULES, PROMPT, {"says": {**MEASURED, "prefill_tokens_per_s": 0.0}}),
        (RULES, PROMPT, {"host_blocks": 0}),
        (RULES, PROMPT, {"cached": False}),
        (RULES, PROMPT, {"workers": 1}),
        (RULES, PROMPT, {"says": {**MEASURED, "link_bytes_per_s": {"worker-0": 1.0, "worker-1": 1.0}}}),
    ],
    ids=["off", "short", "unmeasured", "no host", "no cache", "alone", "slow link"],
)
def test_nothing_is_copied_where_it_does_not_pay(rules: Rules, prompt: int, kinds: dict[str, Any]) -> None:
    world = world_of(**{"rules": rules, **kinds})
    begun(world, prompt=prompt)
    finish(world)
    assert orders(world) == []


def test_a_keeper_that_dies_is_replaced() -> None:
    world = world_of(workers=3)
    (request,) = begun(world)
    world.until(lambda: any(shadows(world, name) for name in world.workers), limit_s=10)
    keeper = next(name for name in world.workers if shadows(world, name))
    world.kill(world.workers[keeper], 1e6)
    third = next(name for name in world.workers if name not in (keeper, world.worker_of(request)))
    world.until(lambda: shadows(world, third) >= PROMPT // BLOCK, limit_s=10)
    finish(world)


def test_an_order_that_nobody_answers_holds_up_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "ANSWER_S", 0.5)
    world = world_of(rules=RULES)
    lost: list[object] = []

    def is_lost(effect: object) -> bool:
        if isinstance(effect, AskPull) and not lost:
            lost.append(effect)
            return True
        return False

    world.is_lost = is_lost
    (request,) = begun(world)
    keeper = other(world, request)
    world.until(lambda: shadows(world, keeper) >= PROMPT // BLOCK, limit_s=10)
    assert lost and world.core.describe()["shadow_orders_failed"] == 1
    finish(world)


def test_one_order_at_a_time_from_each_and_the_longest_first() -> None:
    world = world_of(workers=1, kv_blocks=1000)
    begun(world, count=4)
    world.start_worker("worker-1")
    world.until(lambda: shadows(world, "worker-1") >= 4 * PROMPT // BLOCK, limit_s=20)
    finish(world)


class Fleet:
    """Workers with one long sequence each, and whatever is ordered from them."""

    def __init__(self, workers: int, room_blocks: int, **says: Any) -> None:
        self.now_s = 0.0
        running = [sequence(f"r{number}", generated=1) for number in range(workers)]
        pipelines: dict[str, Any] = {}
        for number, one in enumerate(running):
            one.worker_id = name = f"worker-{number}"
            listed = sequence_report(one.ref, SequenceState.DECODING, computed_tokens=4, generated_tokens=1)
            report = worker_report(
                name,
                sequences=(listed,),
                prefill_tokens_per_s=10.0,
                fingerprint=b"f" * 16,
                caches_prefixes=True,
                kv_block_bytes=1,
                shadow_room_blocks=room_blocks,
                block_tokens=1,
                **says,
            )
            pipelines[name] = SimpleNamespace(worker_id=name, report=report)
        by_key = {one.key: one for one in running}
        roster: Any = SimpleNamespace(
            pipelines=pipelines, sequences=by_key, find=lambda ref: by_key[ref.key], in_step=pipelines.get
        )
        moves: Any = SimpleNamespace(by_key={})
        self.shadowing = Shadowing(roster, moves, 0.1)

    def tick(self) -> list[AskPull]:
        """Nothing is answered."""
        self.now_s += 0.02
        asked = [effect for effect in self.shadowing.on_tick(self.now_s) if isinstance(effect, AskPull)]
        self.shadowing.check_integrity()
        return asked

    def say(self, name: str, **changes: Any) -> None:
        """In the heartbeats of one worker from now on."""
        pipeline = self.shadowing._roster.pipelines[name]
        pipeline.report = msgspec.structs.replace(pipeline.report, **changes)

    def next_order(self, ref: SequenceRef) -> AskPull:
        """For that sequence; other orders bring all that was missing."""
        for _ in range(1000):
            for asked in self.tick():
                if asked.ref == ref:
                    return asked
                self.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=4), self.now_s)
        raise AssertionError("nothing was ordered in 20 s")


def test_a_tick_costs_the_same_however_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker was looked at in one tick, and for each sequence without a keeper every other worker:
    where no room was left, a tick of 1,000 workers took 18 s."""
    compared: list[int] = []

    def choose(*of: Any) -> None:
        compared.append(len(list(of[-1])))

    monkeypatch.setattr(shadowing, "choose_keeper", choose)
    fleet = Fleet(400, room_blocks=10)
    for _ in range(3):
        del compared[:]
        fleet.tick()
        assert 0 < len(compared) <= shadowing._MOST_LOOKS and max(compared) <= 8
    for _ in range(60):
        fleet.tick()
    assert len(fleet.shadowing._looked) == 400, "each has had its turn"


def test_a_worker_is_linked_with_few_others() -> None:
    """Whoever had most memory free kept the next sequence of whichever worker: within minutes each was linked
    with all, more than a listener takes, and moves found it full."""
    fleet = Fleet(40, room_blocks=10)
    keepers: dict[str, set[str]] = {}
    for turn in range(40):
        for name, pipeline in fleet.shadowing._roster.pipelines.items():
            free = 1000 if name == f"worker-{turn}" else 1
            fleet.say(name, capacity=msgspec.structs.replace(pipeline.report.capacity, free_blocks=free))
        for _ in range(20):
            for asked in fleet.tick():
                keepers.setdefault(asked.order.source, set()).add(asked.worker_id)
                fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=4), fleet.now_s)
        fleet.shadowing._shadows.clear()  # All of them end, and others begin.
    assert len(keepers) == 40 and max(map(len, keepers.values())) <= 8


def test_what_the_keeper_has_already_is_no_reason_to_wait() -> None:
    """After a change of schedulers nothing had to be fetched, and for 5 s nothing was."""
    fleet = Fleet(2, room_blocks=10)
    asked, *_ = fleet.tick()
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=3), fleet.now_s)
    again = [one.ref for _ in range(30) for one in fleet.tick()]
    assert asked.ref in again


def test_an_order_whose_time_was_over_is_followed_by_another_soon() -> None:
    """A link that rested when one came brought nothing, and for 5 s nobody asked again: most of an answer was
    without a copy."""
    fleet = Fleet(2, room_blocks=10)
    asked, *_ = fleet.tick()
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=2, fetched_blocks=2), fleet.now_s)
    asked = fleet.next_order(asked.ref)
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=2, is_cut_short=True), fleet.now_s)
    began_s = fleet.now_s
    fleet.next_order(asked.ref)
    assert fleet.now_s - began_s < 1.0


def test_what_failed_with_a_source_that_died_does_not_hold_up_the_next_one() -> None:
    """Its death broke the order that was under way, and its next life had no copies for 5 s."""
    fleet = Fleet(2, room_blocks=10)
    asked, *_ = fleet.tick()
    fleet.shadowing.on_pulled(asked.ref, None, fleet.now_s)
    began_s = fleet.now_s
    fleet.next_order(asked.ref)
    assert fleet.now_s - began_s > 4.0, "the same one rests"
    fleet.shadowing.on_pulled(asked.ref, None, fleet.now_s)
    fleet.say(asked.order.source, incarnation=77)
    began_s = fleet.now_s
    fleet.next_order(asked.ref)
    assert fleet.now_s - began_s < 1.0


def test_a_keeper_without_room_is_left_for_one_that_has_it() -> None:
    """It was asked again every 5 s for as long as the sequence ran, while others had room for all of it."""
    fleet = Fleet(3, room_blocks=0)
    fleet.say("worker-1", shadow_room_blocks=2)
    asked = next(one for one in fleet.tick() if one.order.source == "worker-0")
    for held in (2, 2):
        assert asked.worker_id == "worker-1"
        fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=held), fleet.now_s)
        fleet.say("worker-1", shadow_room_blocks=0)
        asked = fleet.next_order(asked.ref)
    assert asked.worker_id == "worker-1", "nobody else has room"
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=2), fleet.now_s)
    fleet.say("worker-2", shadow_room_blocks=3)
    asked = fleet.next_order(asked.ref)
    assert asked.worker_id == "worker-1", "worker-2 has no room for all of it"
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=2), fleet.now_s)
    fleet.say("worker-2", shadow_room_blocks=4)
    asked = fleet.next_order(asked.ref)
    assert asked.worker_id == "worker-2"
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=4, fetched_blocks=4), fleet.now_s)
    assert fleet.next_order(asked.ref).worker_id == "worker-2", "it stays"


def test_what_is_whole_is_renewed_over_a_measured_link() -> None:
    """Nothing came sooner than it would have been computed in no time: where the link had been measured the
    keeper heard no more of a sequence that stood still, and after 20 s gave its copy away."""
    links = {f"worker-{number}": 1e9 for number in range(2)}
    fleet = Fleet(2, room_blocks=10, link_bytes_per_s=links)
    asked, *_ = fleet.tick()
    fleet.shadowing.on_pulled(asked.ref, BlocksPulled(held_tokens=4, fetched_blocks=4), fleet.now_s)
    began_s = fleet.now_s
    fleet.next_order(asked.ref)
    assert fleet.now_s - began_s < 6.0
