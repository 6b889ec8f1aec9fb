"""Each kind of side serves, on the same device bytes."""

from itertools import islice

import pytest

from bench.kit.models import TINY_CHAT
from bench.live.pie.sides import AUTO, RECOMPUTE, SWAP, EngineSide, Ground, Kind, fixed, synchronous
from bench.live.pie.workload import Workload

BLOCKS = 40


@pytest.mark.parametrize(
    "kind", [RECOMPUTE, SWAP, AUTO, fixed(6), synchronous(6)], ids=lambda kind: kind.name
)
def test_a_side_serves_on_the_bytes_it_has(kind: Kind) -> None:
    workload = Workload(str(TINY_CHAT), 1)
    requests = list(islice(workload.requests(), 8))
    side = EngineSide(kind, Ground(TINY_CHAT, BLOCKS, 1e9, clients=6), iter(requests))
    try:
        side.set_background(1e6)
        side.loop.run(30.0, until=lambda: len(side.loop.answers) == 8)
        side.loop.check_integrity()
        assert {each.reason for each in side.loop.answers} <= {"stop", "length"} and len(
            side.loop.answers
        ) == 8
        waited_s, computed_s = side.stall_s
        assert (computed_s > 0) == kind.has_pie and waited_s >= 0
        if kind == synchronous(6):
            assert waited_s > 0
        if kind.has_pie:
            assert side.engine.pie is not None
            arena = side.engine.pie.store.memory.partition.arena_blocks
            assert arena == 8 * BLOCKS
        assert side.engine.kv_blocks == (BLOCKS * 2 if kind.fifo_layers == 6 else BLOCKS)
    finally:
        side.close()


def test_it_settles_for_a_time_and_then_for_the_length_of_answers() -> None:
    workload = Workload(str(TINY_CHAT), 1)
    side = EngineSide(RECOMPUTE, Ground(TINY_CHAT, BLOCKS, 1e9, clients=6), workload.requests(6))
    try:
        assert side.mean_answer_s == 0.0
        side.loop.run(60.0, until=lambda: len(side.loop.answers) >= 6)
        began_s, answer_s = side.loop.ran_s, side.mean_answer_s
        side.settle(0.2, 5.0)
        assert answer_s > 0 and side.loop.ran_s - began_s >= 0.2 + 1.9 * min(answer_s, side.mean_answer_s)
        began_s = side.loop.ran_s
        side.settle(1e9, 0.1, answers=0.0)
        assert side.loop.ran_s - began_s < 30
    finally:
        side.close()
