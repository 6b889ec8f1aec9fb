"""Histories of operations for packing policies: random ones, and those made to hurt."""

import random
from collections.abc import Iterator

from hypothesis import strategies as st

from services.placement.policy.contract import Action, Operation, PackingEffects, PackingPolicy, RequestKey
from services.placement.policy.mell.cluster import LARGE, MEDIUM, SMALL, TINY, Cluster

CAPACITY = 240
"""Divisible by 2, 3, 4 and 8: class borders fall on whole blocks."""

sizes = st.one_of(st.integers(1, CAPACITY), st.integers(1, CAPACITY // 3), st.integers(1, CAPACITY // 10))
steps = st.lists(st.tuples(st.integers(0, 5), sizes, st.integers(0, 10**6)), max_size=60)
"""(what, blocks, which of the living)."""


class World:
    """Where requests are by the effects alone: what a worker would see."""

    def __init__(self, policy: PackingPolicy, workers: int) -> None:
        self.policy = policy
        self.blocks: dict[RequestKey, int] = {}
        self.homes: dict[RequestKey, str] = {}
        self.next_request = 0
        for index in range(workers):
            policy.add_worker(f"w{index:04d}")

    def operation(self, what: int, blocks: int, which: int) -> Operation:
        """Half arrivals, a third growths, a sixth ends."""
        living = list(self.blocks)
        if what <= 2 or not living:
            self.next_request += 1
            return Operation(Action.ALLOCATE, self.next_request, max(1, blocks))
        request = living[which % len(living)]
        if what == 5:
            return Operation(Action.END, request)
        return Operation(Action.GROW, request, min(CAPACITY, self.blocks[request] + 1 + blocks // 3))

    def apply(self, operations: list[Operation]) -> PackingEffects:
        for one in operations:
            if one.action is Action.END:
                del self.blocks[one.request]
            else:
                self.blocks[one.request] = one.blocks
        single = len(operations) == 1
        effects = self._single(operations[0]) if single else self.policy.apply(operations)
        self.follow(effects, {one.request for one in operations if one.action is Action.END})
        return effects

    def _single(self, one: Operation) -> PackingEffects:
        if one.action is Action.END:
            return self.policy.end(one.request)
        call = self.policy.grow if one.action is Action.GROW else self.policy.allocate
        return call(one.request, one.blocks)

    def follow(self, effects: PackingEffects, ended: set[RequestKey]) -> None:
        """Carries the effects out, and compares with the policy's own books."""
        for request in (*ended, *effects.displaced):
            self.homes.pop(request, None)
        for lost in (*effects.waiting, *effects.displaced):
            del self.blocks[lost]
        for move in effects.moves:
            if move.request in self.homes:
                assert self.homes[move.request] == move.source != move.target
                assert move.blocks == self.blocks[move.request]
                self.homes[move.request] = move.target
        for request, worker in effects.placed.items():
            assert request not in self.homes
            self.homes[request] = worker
        assert self.homes.keys() == self.blocks.keys(), "somebody was lost"
        self.policy.check_integrity()
        loads: dict[str, int] = {}
        for request, worker in self.homes.items():
            assert self.policy.worker_of(request) == worker
            loads[worker] = loads.get(worker, 0) + self.blocks[request]
        assert all(load <= CAPACITY for load in loads.values()), "over capacity"
        assert len(loads) == self.policy.active_workers


def churn(
    seed: int, count: int, *, least: int, most: int, growth: int, ends: float
) -> Iterator[tuple[int, int, int]]:
    """A long random history as `World.operation` takes it."""
    draw = random.Random(seed)
    for _ in range(count):
        what = 5 if draw.random() < ends else draw.choice((0, 3) if growth else (0,))
        blocks = draw.randint(least, most) if what == 0 else draw.randint(0, growth)
        yield what, blocks, draw.randrange(10**6)


def exceptions(cluster: Cluster) -> dict[str, int]:
    """Return the number of GPUs that violate each property of Theorem 1."""
    gpus = list(cluster.active.values())
    loose = [gpu for gpu in gpus if 4 * gpu.used < 3 * cluster.capacity]
    middles = [
        item.size
        for gpu in gpus
        if gpu.category != LARGE
        for shelf in (gpu.held[SMALL], gpu.held[MEDIUM])
        for item in shelf
    ]
    smallest = min(middles, default=cluster.capacity + 1)
    return {
        # One M and two S weigh 7/6 and fill 5/6, so Theorem 2 holds.
        "two M": sum(
            gpu.category == MEDIUM and len(gpu.held[MEDIUM]) < 2 and len(gpu.held[SMALL]) < 2 for gpu in gpus
        ),
        "three S": sum(gpu.category == SMALL and len(gpu.held[SMALL]) < 3 for gpu in gpus),
        "T at 3/4": sum(gpu.category == TINY for gpu in loose),
        "L takes M or S": sum(gpu.companion_room >= smallest for gpu in gpus),
        "T only beside full": any(gpu.category == TINY for gpu in gpus)
        * sum(gpu.category in (LARGE, MEDIUM) for gpu in loose),
    }
