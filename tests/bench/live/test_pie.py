"""Each kind of side serves, on the same device bytes."""

import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.kit.models import TINY_CHAT
from bench.live.pie import arena
from bench.live.pie.loop import Loop, Request
from bench.live.pie.rounds import (
    Moment,
    SideResult,
    Slice,
    measure,
    measure_work,
    react,
    same_text_share,
    spread,
    take_turns,
)
from bench.live.pie.sides import AUTO, MOST_TOKENS, RECOMPUTE, SWAP, EngineSide, Ground, Kind, Workload, fixed
from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.first_come import VllmPolicy
from services.worker.core.settings import PieSettings
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from tests.bench.rig import context_of
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.pie.conftest import LAYERS, llama

BLOCKS = 40


@pytest.mark.parametrize("kind", [RECOMPUTE, SWAP, AUTO, fixed(6)], ids=lambda kind: kind.name)
def test_a_side_serves_on_the_bytes_it_has(kind: Kind) -> None:
    workload = Workload(str(TINY_CHAT), 1)
    requests = list(islice(workload.requests(), 8))
    side = EngineSide(kind, Ground(TINY_CHAT, BLOCKS, 1e9, clients=6), iter(requests))
    try:
        side.set_background(1e6)
        side.loop.run(30.0, until=lambda: len(side.loop.answers) == 8)
        side.loop.check_integrity()
        assert {e.reason for e in side.loop.answers} <= {"stop", "length"} and len(side.loop.answers) == 8
        waited_s, computed_s = side.stall_s
        assert (computed_s > 0) == kind.has_pie and waited_s >= 0
        if kind.has_pie:
            assert side.engine.pie is not None and side.engine.pie.kv.residency.device_blocks == BLOCKS
        assert side.engine.kv_blocks == (BLOCKS * 2 if kind.fifo_layers == 6 else BLOCKS)
    finally:
        side.close()


def test_it_settles_for_a_time_and_then_for_the_length_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of answers changes while it runs, so it is held for the comparison."""
    workload = Workload(str(TINY_CHAT), 1)
    side = EngineSide(RECOMPUTE, Ground(TINY_CHAT, BLOCKS, 1e9, clients=6), workload.requests(6))
    try:
        assert side.mean_answer_s == 0.0
        side.loop.run(60.0, until=lambda: len(side.loop.answers) >= 6)
        latest = [each.ended_s - each.sent_s for each in side.loop.answers[-6:]]
        assert side.mean_answer_s == pytest.approx(sum(latest) / 6) and min(latest) > 0
        monkeypatch.setattr(EngineSide, "mean_answer_s", 0.3)
        began_s = side.loop.ran_s
        side.settle(0.2, 5.0)
        assert side.loop.ran_s - began_s >= 0.2 + 2 * 0.3
        began_s = side.loop.ran_s
        side.settle(1e9, 0.1, answers=0.0)
        assert side.loop.ran_s - began_s < 30
    finally:
        side.close()


def test_every_side_gets_the_same_and_a_trained_model_ends_by_itself() -> None:
    workload = Workload(str(TINY_CHAT), 3)
    first, again = (list(islice(workload.requests(), 20)) for _ in range(2))
    assert first == again
    assert {each.max_tokens for each in first} == {MOST_TOKENS} and all(each.end_token_ids for each in first)
    assert first != list(islice(Workload(str(TINY_CHAT), 4).requests(), 20))


def test_sides_begin_after_the_same_work_and_are_closed(tmp_path: Path) -> None:
    ground = arena.Arena(context_of("pie", tmp_path, "--fits", "5"))
    assert ground.ground.device_blocks == int(5 * ground.mean_tokens // 16) and len(ground.notes()) == 2
    with ground.sides([RECOMPUTE, fixed(6)], ground.ground, warm_answers=3) as sides:
        assert all(3 <= len(side.loop.answers) <= 4 for side in sides)
        answered = len(sides[0].loop.answers)
        sides[0].serve(2)
        assert len(sides[0].loop.answers) >= answered + 2


def test_the_live_parts_on_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "QUICK", arena.Pace(1, 0.4, 0.1, 0.2, 0.4, 1.0, 2, 2, 2))
    words = ["pie", "--quick", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is False and result["failures"] == 0
    assert figures["fig4_expansion"] == 1.286 and figures["same_text_share"] == 1.0
    for name in ("throughput_vs_none_low", "vs_best_fixed", "narrow_vs_none_high", "reaction_tok_s_under"):
        assert figures[name] > 0
    rows = [json.loads(line) for line in (tmp_path / "slices.jsonl").read_text().splitlines()]
    assert {"recompute", "swap", "auto"} <= {row["side"] for row in rows}
    assert (tmp_path / "reaction.png").stat().st_size > 1000


def test_traffic_slows_the_link_and_goes_away() -> None:
    requests = islice(Workload(str(TINY_CHAT), 1).requests(), 500)
    side = EngineSide(fixed(6), Ground(TINY_CHAT, 24, 4e8, clients=6), requests)
    try:
        heard: list[Moment] = []
        found = react(side, [(0.5, 0.0), (1.0, 3.6e8), (0.5, 0.0)], heard.append)
        assert list(found.moments) == heard and [each.at_s for each in heard] == [0.5, 1.0, 1.5, 2.0]
        assert found.traffic == ((0.5, 1.5),)
        under = found.during(0.5, 1.5)
        assert max(each.stall_share for each in under) > 0
    finally:
        side.close()


GROUND = Ground(TINY_CHAT, 40, 0.0, clients=8)


def served(name: str, *rates: float) -> SideResult:
    return SideResult(name, tuple(Slice(rate, 0.01, 4.0, 0.0, 0) for rate in rates), 0.1, 0.2, 9, 0)


def test_a_ratio_is_of_all_turns_with_an_interval() -> None:
    found = spread("x", served("ours", 30, 10, 20), served("theirs", 10, 10, 5))
    assert found["x"] == 60 / 25 and 1 <= found["x_low"] <= 60 / 25 <= found["x_high"] <= 4
    assert served("x", 3, 1, 5).tokens_per_s == 3 and served("x", 1).mean(lambda one: one.batch) == 4


def test_two_real_sides_take_turns_and_say_the_same() -> None:
    workload = Workload(str(TINY_CHAT), 0)
    requests = list(islice(workload.requests(), 400))
    sides = [EngineSide(kind, GROUND, iter(requests)) for kind in (RECOMPUTE, fixed(5))]
    order: list[str] = []
    try:
        found = take_turns(sides, 2, partial(measure, duration_s=0.5), lambda s, _: order.append(s.kind.name))
        assert order == ["recompute", "fixed 5", "fixed 5", "recompute"]
        assert [each.name for each in found] == ["recompute", "fixed 5"]
        assert all(len(each.slices) == 2 and each.tokens_per_s > 0 for each in found)
        assert [each.failures for each in found] == [0, 0]
        assert found[0].slices[0].fifo_layers == 0 and found[1].slices[0].fifo_layers == 5
        for side in sides:
            side.loop.run(10.0, until=lambda side=side: len(side.loop.answers) >= 8)  # type: ignore[misc]
        assert same_text_share(sides[1], sides[0]) == 1.0
        sides[1].loop.answers[0].tokens[0] += 1
        assert same_text_share(sides[1], sides[0]) < 1.0 and measure(sides[0], 0.1).stall_share == 0.0
        answered = len(sides[0].loop.answers)
        assert measure_work(sides[0], 2).took_s > 0 and len(sides[0].loop.answers) >= answered + 2
    finally:
        for side in sides:
            side.close()


__all__ = ["llama"]
REQUESTS = 24
DEVICE_BLOCKS = 24


def requests() -> Iterator[Request]:
    dice = random.Random(4)
    for _ in range(REQUESTS):
        prompt = tuple(dice.randrange(3, VOCABULARY) for _ in range(dice.randrange(1, 30)))
        yield Request(prompt, dice.randrange(2, 40))


def make_loop(model: Any, **settings: Any) -> Loop:
    pie = PieSettings(enabled=bool(settings), notice_s=0.05, **settings)
    engine = TorchEngine(describe(model), kv_blocks=DEVICE_BLOCKS, block_tokens=4, pie=pie)
    return Loop(engine, requests(), clients=10, settings=PolicySettings(max_batch_sequences=16))


def texts(loop: Loop) -> list[list[int]]:
    assert all(each.reason == "length" for each in loop.answers)
    return [each.tokens for each in sorted(loop.answers, key=lambda each: each.index)]


def finish(loop: Loop) -> None:
    loop.run(60.0, until=lambda: len(loop.answers) == REQUESTS)
    loop.check_integrity()


@pytest.fixture(scope="module")
def expected(llama: Any) -> list[list[int]]:
    plain = make_loop(llama)
    finish(plain)
    assert plain.resyncs == 1 and len(plain.answers) == REQUESTS
    assert [len(each) for each in texts(plain)] == [each.max_tokens for each in requests()]
    return texts(plain)


@pytest.mark.parametrize("settings", [{"expansion": "fixed", "fifo_layers": 5}, {"window_iterations": 4}])
def test_the_text_is_the_same(llama: Any, expected: list[list[int]], settings: dict[str, Any]) -> None:
    loop = make_loop(llama, **settings)
    assert loop.engine.pie is not None
    finish(loop)
    assert texts(loop) == expected
    loop.engine.pie.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_scheduler_follows_the_capacity(llama: Any, expected: list[list[int]], seed: int) -> None:
    """Grows and shrinks under load: heartbeats tell, the next plans hold, what is doomed moves at once."""
    loop, dice = make_loop(llama, window_iterations=10_000), random.Random(seed)
    pie = loop.engine.pie
    assert pie is not None
    seen: set[int] = set()
    wanted = [0]
    while len(loop.answers) < REQUESTS:
        if not pie.is_resizing:
            wanted.append(dice.choice([0, 3, 4, LAYERS - 1]))
            pie.want(wanted[-1])
        steps = loop.steps + dice.randrange(1, 12)
        loop.run(5.0, until=lambda steps=steps: loop.steps >= steps or len(loop.answers) == REQUESTS)  # type: ignore[misc]
        loop.beat()
        policy = loop._scheduler._roster.pipelines["worker-0"].policy
        assert policy is not None and isinstance(policy.inner, VllmPolicy)
        assert policy.inner._table.capacity_blocks == pie.capacity_blocks
        loop.check_integrity()
        pie.kv.residency.check_integrity()
        seen.add(pie.capacity_blocks)
    assert texts(loop) == expected
    changes = sum(before != after for before, after in pairwise(wanted))
    assert len(seen) >= 2, "it has grown; how often depends on how long a change takes"
    assert loop.resyncs <= 1 + changes, "plans run into changes that no heartbeat has told, only"
    pie.close()


def test_clients_join_one_after_the_other(llama: Any) -> None:
    engine = TorchEngine(describe(llama), kv_blocks=DEVICE_BLOCKS, block_tokens=4)
    settings = PolicySettings(max_batch_sequences=16)
    loop = Loop(engine, requests(), clients=10, settings=settings, ramp_s=20.0)
    loop.run(0.02)
    assert len(loop._open) <= 1
    loop.ran_s = 10.0
    loop.run(0.001)
    assert 4 <= len(loop._open) <= 6
    loop.ran_s = 20.0
    finish(loop)
