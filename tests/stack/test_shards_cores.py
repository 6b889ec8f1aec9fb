"""Two shards' cores with real workers and streams on virtual time: one order by work, no sequence twice."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import mean
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import Effect, GiveToShard
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.kvasir import KvasirPolicy
from shared.messages.commands import PlacementItem
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec
from shared.shards import Shard, shard_of
from tests.stack.actors import Wanted
from tests.stack.world import EVEN, World

RULES = Rules(settings=PolicySettings(token_budget=64, max_batch_sequences=4), round_s=0.3)
ANNOUNCED_S = 0.1
"""While a shard has a queue and another has room."""


class ShardedWorld(World):
    """One process with the cores of all shards. Placement lets a sequence wait where all batches are full."""

    def __init__(self, *args: Any, shards: int, **kinds: Any) -> None:
        self.shards = [Shard(number, shards) for number in range(shards)]
        self.cores: list[SchedulerCore] = []
        self.home: dict[SequenceKey, int] = {}
        self.handed: Counter[SequenceKey] = Counter()
        self.since_s: dict[SequenceKey, float] = {}
        self.took_s: dict[SequenceKey, float] = {}
        super().__init__(*args, rules=RULES, policy=KvasirPolicy, **kinds)
        self.every(ANNOUNCED_S, self._tell_loads)

    def _lead(self, epoch: int) -> None:
        super()._lead(epoch)
        self.cores = [
            SchedulerCore(self.rules, self.policy, epoch, self.core_s, shard=shard) for shard in self.shards
        ]

    def _tell_loads(self) -> None:
        for shard, core in zip(self.shards, self.cores, strict=True):
            for other in self.cores:
                if core.sharing is not None and other.sharing is not None and other is not core:
                    other.sharing.on_load(shard.number, core.sharing.load(self.core_s), self.core_s)

    def feed(self, event: str, *details: Any, **more: Any) -> None:
        named: Any = getattr(details[0], "worker_id", details[0]) if details else None
        of_worker = event in ("on_worker_reported", "on_stepped", "on_snapshot", "on_snapshot_failed")
        for core, shard in zip(self.cores, self.shards, strict=True):
            if not of_worker or shard.has(named):
                self._feed(core, event, *details, **more)

    def _feed(self, core: SchedulerCore, event: str, *details: Any, **more: Any) -> None:
        self.core = core
        super().feed(event, *details, **more)
        for key in self.streams:
            known = [each for one in self.cores if (each := one._roster.sequences.get(key)) is not None]
            assert len({each.ref for each in known}) == len(known), f"{key} is in two shards"

    def _while_it_lives(self, event: str, *details: Any) -> Callable[[], None]:
        core = self.core
        return lambda: self._feed(core, event, *details) if core in self.cores else None

    def submitted(self, spec: SequenceSpec) -> None:
        key = spec.ref.key
        self.since_s.setdefault(key, self.now_s)
        self.core = self.cores[self.home.setdefault(key, 0)]
        super().submitted(msgspec.structs.replace(spec, is_bound=key in self.handed))

    def _carry_out_plan(self, effect: Effect) -> None:
        if isinstance(effect, GiveToShard):
            key, ref, shard = effect.ref.key, effect.ref, effect.shard
            self.send(self.scheduler.name, self.gateway, lambda: self._handed_over(key, ref, shard))
        else:
            super()._carry_out_plan(effect)

    def _handed_over(self, key: SequenceKey, ref: SequenceRef, shard: int) -> None:
        self.home[key] = shard
        self.handed[key] += 1
        self.gateway.apply(key, self.streams[key].on_prepared(ref, self.now_s, cause="shard"))

    def place(self, items: tuple[PlacementItem, ...], excluded: tuple[str, ...]) -> tuple[str | None, ...]:
        """To the worker with the fewest sequences, as long as a batch has room."""
        counts = Counter(self.core._roster.counts())
        found: list[str | None] = []
        for _ in items:
            names = [name for name in self.core._roster.pipelines if name not in excluded]
            name = min(names, key=lambda each: (counts[each], each), default=None)
            full = name is None or counts[name] >= RULES.settings.max_batch_sequences
            found.append(None if full else name)
            counts[name or ""] += 1
        return tuple(found)

    def run_all(self, limit_s: float) -> float:
        """Run to the end; return the mean time to completion in seconds."""

        def note() -> bool:
            for key, stream in self.streams.items():
                if not stream.is_open and key not in self.took_s:
                    self.took_s[key] = self.now_s - self.since_s[key]
            return self.is_over

        self.until(note, limit_s=limit_s)
        assert all(request.stream.failure is None for request in self.requests)
        return mean(self.took_s.values())


def world_of(shards: int, requests: list[tuple[float, Wanted]], home: int, workers: int = 4) -> ShardedWorld:
    pace = replace(EVEN, steps_s=(0.01,))
    world = ShardedWorld(
        3, [one for _, one in requests], shards=shards, workers=workers, kv_blocks=200, pace=pace
    )
    for (at_s, _), key in zip(requests, world.wanted, strict=True):
        world.home[key] = min(home, shards - 1)
        world.at(at_s, partial(world.submit, key))
    return world


def arrivals(count: int, per_s: float) -> list[tuple[float, Wanted]]:
    """Mixed lengths, as a Poisson process."""
    rng, at_s, found = Random(5), 1.5, []
    for _ in range(count):
        at_s += rng.expovariate(per_s)
        answer = rng.choice((5, 20, 40, 120))
        found.append((at_s, Wanted(rng.choice((20, 60, 150)), answer, answer)))
    return found


def busy_shares(world: ShardedWorld) -> dict[int, float]:
    """Steps of each shard's workers, for each of its workers."""
    steps: dict[int, list[int]] = {}
    for name, worker in world.workers.items():
        steps.setdefault(shard_of(name, 2), []).append(len(worker.step_tokens))
    return {shard: mean(each) for shard, each in steps.items()}


def test_no_worker_idles_and_answers_come_as_soon_as_from_one_queue() -> None:
    """All arrive at the shard that has one of four workers, at nine tenths of what all four can do."""
    requests = arrivals(160, per_s=27.0)
    alone, divided = world_of(1, requests, home=0), world_of(2, requests, home=1)
    alone.is_checked = divided.is_checked = False
    alone_s, divided_s = alone.run_all(120.0), divided.run_all(120.0)
    shares = busy_shares(divided)
    print(f"mean completion: one queue {alone_s:.3f} s, two shards {divided_s:.3f} s; steps {shares}")
    assert shares[0] > 0.8 * shares[1]
    assert divided_s < 1.1 * alone_s
    assert max(divided.handed.values()) == 1


def test_a_shard_without_workers_gives_its_queue_away() -> None:
    world = world_of(2, [(1.5, Wanted(20, 5, 5)), (3.0, Wanted(20, 5, 5))], home=1, workers=2)
    assert {shard_of(name, 2) for name in world.workers} == {0}
    world.run_all(10.0)
    assert set(world.handed.values()) == {1} and set(world.home.values()) == {0}


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 16),
    homes=st.lists(st.integers(0, 1), min_size=1, max_size=8),
    kills=st.lists(st.tuples(st.floats(1.5, 5.0), st.integers(0, 3), st.floats(0.1, 4.0)), max_size=3),
)
def test_no_sequence_is_in_two_shards(
    seed: int, count: int, homes: list[int], kills: list[tuple[float, int, float]]
) -> None:
    """Whatever arrives where, and whichever workers die: every answer is whole and exact."""
    requests = [(at_s, wanted) for at_s, wanted in arrivals(count, per_s=30.0)]
    world = world_of(2, requests, home=0)
    world.random.seed(seed)
    for number, key in enumerate(world.wanted):
        world.home[key] = homes[number % len(homes)]
    for at_s, worker, for_s in kills:
        kill = partial(world.kill, world.workers[f"worker-{worker}"], for_s)
        world.at(at_s, kill)
    world.run_all(120.0)
    for request in world.requests:
        assert request.tokens == request.expected, request
    assert all(times <= 1 + len(kills) for times in world.handed.values())
