"""Kept on the host or computed again: by what the worker measured, within what its host keeps."""

import msgspec
import pytest

from services.scheduler.core.rules import ReliefRules
from services.scheduler.core.worker_pipeline import Preempting, weigh
from services.scheduler.policy.contract import PlannedPreemption
from services.scheduler.policy.relief import Rung
from shared.messages.plans import PreemptMode
from tests.shared.messages.builders import worker_report

ON = ReliefRules(enabled=True)
REPORT = worker_report(
    free_blocks=0,
    prefill_tokens_per_s=1000.0,
    decode_step_s=0.01,
    host_block_s=0.001,
    swap_room_blocks=10,
)
VICTIM = PlannedPreemption(("r", 0), held_blocks=6, computed_tokens=90)


def test_the_cheaper_way_is_taken_and_its_costs_are_told() -> None:
    mode, relief = weigh(REPORT, VICTIM, 10, ON)
    assert mode is PreemptMode.SWAP and relief is not None
    assert {offer.rung: round(offer.cost_s, 3) for offer in relief.offers} == {
        Rung.SWAP: 0.012,
        Rung.RECOMPUTE: 0.09,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"host_block_s": 0.0},
        {"host_block_s": 0.02},
        {"prefill_tokens_per_s": 20_000.0},
        {"block_tokens": 100},
    ],
)
def test_what_is_slower_or_was_never_measured_is_not(changed: dict[str, float]) -> None:
    assert weigh(msgspec.structs.replace(REPORT, **changed), VICTIM, 10, ON)[0] is PreemptMode.RECOMPUTE


def test_each_rung_can_be_switched_off_and_the_ladder_as_a_whole() -> None:
    off = ReliefRules(enabled=True, switched_off=frozenset({Rung.SWAP}))
    assert weigh(REPORT, VICTIM, 10, off)[0] is PreemptMode.RECOMPUTE
    slow = msgspec.structs.replace(REPORT, host_block_s=1.0)
    off = ReliefRules(enabled=True, switched_off=frozenset({Rung.RECOMPUTE}))
    assert weigh(slow, VICTIM, 10, off)[0] is PreemptMode.SWAP
    assert weigh(REPORT, VICTIM, 10, ReliefRules()) == (PreemptMode.RECOMPUTE, None)


def test_the_host_is_not_promised_twice_between_two_heartbeats() -> None:
    preempting = Preempting()
    modes = [preempting.decide(REPORT, VICTIM, ON)[0] for _ in range(2)]
    assert modes == [PreemptMode.SWAP, PreemptMode.RECOMPUTE]
    preempting.on_heartbeat()
    assert preempting.decide(REPORT, VICTIM, ON)[0] is PreemptMode.SWAP
    assert preempting.counts == {PreemptMode.SWAP: 2, PreemptMode.RECOMPUTE: 1}
