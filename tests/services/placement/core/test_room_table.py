"""A large fleet: the choice among a few rooms is the choice among all of them."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from services.placement.core import fleet as fleets
from services.placement.core.fleet import FleetCapacity
from services.placement.policy import POLICIES
from shared.messages.commands import Crowd, PlacementItem, WaitingAhead
from shared.messages.plans import EndedSequence
from shared.messages.reports import SequenceState, WorkerReported
from shared.messages.sequence import FinishReason
from tests.services.placement.rig import BLOCK, chain, item, listed, report, stepped
from tests.shared.messages.builders import ref

WORKERS = [f"w{number:02}" for number in range(24)]
Answers = list[tuple[str | None, ...]]


def heartbeat(rng: random.Random, worker: str, seq: int) -> WorkerReported:
    states = (SequenceState.DECODING, SequenceState.WAITING, SequenceState.PREFILLING)
    sequences = tuple(
        listed(
            f"{worker}-{at}", prompt=rng.randint(1, 80), blocks=rng.randint(0, 4), state=rng.choice(states)
        )
        for at in range(rng.randint(0, 3))
    )
    return report(
        worker,
        total=rng.randint(8, 64),
        sequences=sequences,
        seq=seq,
        caches_prefixes=True,
        prefill_tokens_per_s=rng.uniform(500, 5000),
        prefill_context_tokens=rng.uniform(0, 400),
        decode_step_s=rng.uniform(0.01, 1.0),
    )


def question(rng: random.Random, number: int) -> tuple[PlacementItem, ...]:
    return tuple(
        item(
            f"r{number}-{at}",
            size := rng.randint(1, 40 * BLOCK),
            size + rng.randint(1, 200),
            prefixes=rng.choice([(), (chain(rng.randrange(6), 7),)]),
            waited_s=rng.choice((0.0, 9.0)),
        )
        for at in range(rng.randint(1, 4))
    )


def ahead_of(rng: random.Random) -> WaitingAhead:
    names = rng.sample(WORKERS, 6)
    crowds = tuple(
        Crowd(worker_id=name, places=rng.randint(0, 2), tokens=rng.randint(0, 99)) for name in names
    )
    only = tuple(sorted(rng.sample(WORKERS, 18))) if rng.random() < 0.3 else ()
    closed = tuple(rng.sample(WORKERS, rng.randint(0, 5)))
    return WaitingAhead(places=rng.randint(0, 2), crowds=crowds, only=only, closed=closed)


def told(name: str, seed: int) -> Answers:
    """Return the answers of a random history."""
    rng, policy, fleet = random.Random(seed), POLICIES[name](), FleetCapacity()
    answers: Answers = []
    for seq in range(1, 26):
        for worker in WORKERS if seq == 1 else rng.sample(WORKERS, 5):
            fleet.on_reported(heartbeat(rng, worker, seq), seq * 0.1)
        over, worker = ref(f"r{rng.randint(1, seq)}-0"), rng.choice(WORKERS)
        fleet.on_stepped(
            stepped(worker, seq, EndedSequence(ref=over, finish_reason=FinishReason.STOP, generated_tokens=1))
        )
        fleet.on_withdrawn([ref(f"r{rng.randint(1, seq)}-1")])
        excluded = frozenset(rng.sample(WORKERS, 3))
        answers.append(fleet.place(question(rng, seq), excluded, policy, seq * 0.1, ahead_of(rng)))
        fleet.check_integrity()
    return answers


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(POLICIES)))
def test_few_rooms_give_the_same_choice_as_all(seed: int, name: str) -> None:
    few = told(name, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleets, "MANY_WORKERS", 1000)
        assert told(name, seed) == few


def test_who_leaves_a_large_fleet_is_not_chosen_and_may_return(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "MANY_WORKERS", 1)
    fleet, policy = FleetCapacity(), POLICIES["worst_fit"]()
    for number, total in enumerate((8, 64, 32)):
        fleet.on_reported(report(f"w{number}", total=total), 0.0)

    def chosen(name: str) -> str | None:
        return fleet.place((item(name, size=BLOCK),), frozenset(), policy, 0.0)[0]

    assert chosen("a") == "w1"
    assert fleet.on_gone("w1", 1) and chosen("b") == "w2", "the last row took its place"
    fleet.on_reported(report("w1", total=64, seq=2), 0.0)
    assert chosen("c") == "w1"
