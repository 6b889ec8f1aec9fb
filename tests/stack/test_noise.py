"""Whatever arrives at whatever subject or core: no process ends, and nobody else's answer changes."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from services.ledger.core.debt_ledger import DebtLedger, candidates
from services.placement.core.fleet import FleetCapacity
from services.placement.core.packer import Packer
from services.placement.policy import create, create_packing
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import Effect
from services.scheduler.core.rules import Rules
from services.scheduler.policy import find_policy
from services.worker.core.plans import PlanQueue
from shared.config import BusConfig
from shared.errors import InvalidMessage, KvasirError
from shared.messages.base import decode, encode
from shared.messages.commands import (
    CancelSequence,
    FindCreditors,
    LengthPrediction,
    PlacementItem,
    PlaceSequences,
    SubmitSequence,
)
from shared.messages.lending import CreditorOffered
from shared.messages.lengths import LengthsRevised
from shared.messages.moves import BlocksPulled, SequenceMove, SequenceMoved
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.prefixes import WorkerPrefixes
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import SequenceRef
from tests.shared.messages.noise import Noise
from tests.stack.noisy import noisy_stack, targets

MESSAGES = 30
SEED = 18


async def test_noise_changes_no_answer(bus_config: BusConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        outcomes = await _disturb(bus_config, MESSAGES, SEED)
    assert set(outcomes) == {"same"}, outcomes
    unforeseen = [record for record in caplog.records if record.exc_info]
    assert not unforeseen, [record.getMessage() for record in unforeseen]


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_much_noise_on_every_subject_changes_no_answer(bus_config: BusConfig) -> None:
    outcomes = await _disturb(bus_config, 1500, SEED + 1)
    assert set(outcomes) == {"same"}, outcomes


async def _disturb(bus_config: BusConfig, messages: int, seed: int) -> Counter[str]:
    async with noisy_stack(bus_config) as stack:
        await stack.learn()
        outcomes: Counter[str] = Counter()
        for number, target in enumerate(targets()):
            found = await stack.disturb(target, messages, seed * 1000 + number)
            print(f"{target}: {dict(found)}", flush=True)
            outcomes += found
    return outcomes


SEEDS = range(3)
EVENTS = 150
POOLS: dict[str, list[Any]] = {
    "worker_id": ["worker-0", "worker-1"],
    "target": ["worker-0", "worker-1"],
    "gateway_id": ["gateway-0"],
    "incarnation": [1, 2],
    "gateway_incarnation": [1],
    "seq": list(range(1, 40)),
    "epoch": [1],
    "model": ["m"],
    "weights": ["w"],
    "fingerprint": [b"f"],
    "request_id": [f"r{number}" for number in range(8)],
    "choice": [0],
    "attempt": [1, 2],
    "prompt": [bytes(8), bytes(400)],
    "generated": [b"", bytes(4)],
    "outcome": ["ran"],
    "total_blocks": [64, 96],
    "block_tokens": [4, 16],
}


def events(seed: int, kinds: list[type[Any]]) -> Iterator[tuple[Any, float]]:
    """Valid messages of these kinds, and when they come."""
    noise, pick, now_s = Noise(seed, POOLS), random.Random(seed), 0.0
    while True:
        now_s += pick.choice((0.0, 0.01, 0.3))
        kind = pick.choice(kinds)
        try:
            yield decode(msgspec.msgpack.encode(noise.valid(kind)), kind), now_s
        except InvalidMessage:
            continue


def check_said(effects: Any) -> None:
    """Every message in what a core answers can be read."""
    if isinstance(effects, msgspec.Struct) and not isinstance(effects, Effect):
        decode(encode(effects), type(effects))
    elif isinstance(effects, list | tuple):
        for effect in effects:
            check_said(effect)
    else:
        kind = type(effects)
        for name in getattr(kind, "__struct_fields__", getattr(kind, "__dataclass_fields__", ())):
            check_said(getattr(effects, name))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_scheduler(seed: int) -> None:
    core = SchedulerCore(Rules(round_s=0.1), find_policy("kvasir"), 1, 0.0)
    refs: list[SequenceRef] = []
    handlers: dict[type[Any], Callable[[Any, float], Any]] = {
        SubmitSequence: lambda message, now_s: core.on_submit(message.spec, now_s)[1],
        CancelSequence: core.on_cancel,
        WorkerReported: core.on_worker_reported,
        WorkerStepped: core.on_stepped,
        GatewayReported: core.on_gateway_reported,
        SequenceMove: core.on_move,
        LengthPrediction: lambda message, now_s: core.on_predicted(refs[-1], message, now_s) if refs else [],
        LengthsRevised: core.on_revised,
        BlocksPulled: lambda message, now_s: core.on_pulled(refs[-1], message, now_s) if refs else [],
    }
    coming = events(seed, list(handlers))
    for _ in range(EVENTS):
        message, now_s = next(coming)
        if isinstance(message, SubmitSequence):
            refs.append(message.spec.ref)
        try:
            check_said(handlers[type(message)](message, now_s))
            if isinstance(message, WorkerReported):
                check_said(core.on_snapshot(message, now_s))
        except KvasirError:
            pass
        check_said(core.on_placed(core._roster.backlog._question, ("worker-0", "worker-1"), now_s))
        check_said(core.on_tick(now_s))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["prefix_aware", "mell"])
def test_placement(policy: str, seed: int) -> None:
    fleet = FleetCapacity()
    packer = Packer(lambda blocks: create_packing(policy, blocks)) if policy == "mell" else None
    heard: list[type[Any]] = [WorkerReported, WorkerStepped, WorkerPrefixes]
    kinds: list[type[Any]] = [*heard, PlaceSequences, PlacementItem, SequenceMoved]
    coming = events(seed, kinds)
    for _ in range(EVENTS):
        message, now_s = next(coming)
        match message:
            case WorkerReported():
                fleet.on_reported(message, now_s)
            case WorkerStepped():
                fleet.on_stepped(message)
            case WorkerPrefixes():
                fleet.prefixes.on_news(message)
            case PlaceSequences() if packer is None:
                fleet.place(message.items, frozenset(message.excluded_workers), create(policy), now_s)
            case PlaceSequences() if packer is not None:
                packer.place(message.items, frozenset(message.excluded_workers), fleet, now_s)
            case SequenceMoved() if packer is not None:
                packer.on_moved(message, now_s)
        fleet.on_tick(now_s)
        check_said(list(fleet.prefixes.questions(now_s)))
        fleet.prefixes.check_integrity()
        if packer is not None:
            check_said(packer.on_epoch(fleet, now_s))
            packer.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ledger(seed: int) -> None:
    table = DebtLedger()
    coming = events(seed, [WorkerReported, FindCreditors, CreditorOffered])
    for _ in range(EVENTS):
        message, now_s = next(coming)
        match message:
            case WorkerReported():
                table.on_reported(message, now_s)
            case FindCreditors():
                refused = message.refused_by, message.refused_host_by
                check_said(candidates(table, message.debtor_id, message.tokens, *refused))
            case CreditorOffered():
                table.on_refused(message.refused_by)
                table.on_offered(message.creditor_id, message.debtor_id, message.tokens, message.tier)
        table.on_tick(now_s)
        table.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_workers_plans(seed: int) -> None:
    queue = PlanQueue()
    coming = events(seed, [BatchPlan])
    for _ in range(EVENTS):
        plan, now_s = next(coming)
        queue.offer(plan, now_s)
        queue.head(now_s)
        queue.check_integrity()
