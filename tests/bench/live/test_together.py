"""`bench together`: its sides and loads, what it makes of turns, and a short run with real stacks."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from bench.kit.load import Answer, LoadResult
from bench.kit.provenance import ROOT
from bench.kit.stacks import CACHE, OFF
from bench.live.together.bench import SIDES, turn_of
from bench.live.together.figures import EVERYTHING, Turn, figures_of
from bench.live.together.workloads import BLOCK_TOKENS, KV_BLOCKS, WORKERS, WORKLOADS, Request, Workload
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from shared.config import load

ONE_WORKER_TOKENS = KV_BLOCKS * BLOCK_TOKENS


def test_every_side_has_settings_that_there_are() -> None:
    for name, settings in SIDES.items():
        assert settings.keys() >= OFF.keys() or name == EVERYTHING, name
        variables = {
            f"KVASIR_{name.replace('.', '__').upper()}": str(value) for name, value in settings.items()
        }
        load(WorkerConfig, "worker", [], variables).check()
        load(SchedulerConfig, "scheduler", [], variables).check()


def test_everything_is_what_is_on_by_default() -> None:
    assert not any(key in OFF and key not in CACHE for key in SIDES[EVERYTHING])
    worker, scheduler = WorkerConfig(), SchedulerConfig()
    on = (worker.prefix_cache.enabled, worker.lending.lend, worker.lending.borrow, worker.pie.enabled)
    assert all(on) and scheduler.relief


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_load_is_the_same_for_every_side_and_another_one_in_every_turn(workload: Workload) -> None:
    one, again, other = (workload.draw(Random(seed), 4096) for seed in (1, 1, 2))
    assert one == again != other
    assert len(one) == workload.requests and len(workload.draw(Random(1), 4096, quick=True)) == workload.few
    assert [request.at_s for request in one] == sorted(request.at_s for request in one)


def held(requests: list[Request], at_once: int) -> int:
    """Tokens of the largest requests that may be there at the same time, when they end."""
    sizes = sorted((len(one.prompt) + one.answer_tokens for one in requests), reverse=True)
    return sum(sizes[:at_once])


def test_memory_is_short_but_where_it_is_said_not_to_be() -> None:
    for workload in WORKLOADS:
        drawn = workload.draw(Random(1), 4096)
        most = held(drawn, workload.at_once)
        if workload.is_short:
            assert most > WORKERS * ONE_WORKER_TOKENS, workload.name
        else:
            assert most + workload.at_once * BLOCK_TOKENS < ONE_WORKER_TOKENS, "all may be on one worker"
        assert all(len(one.prompt) + one.answer_tokens < WORKERS * ONE_WORKER_TOKENS for one in drawn)


def answer(tokens: int, first_s: float = 1.0, error: str = "") -> Answer:
    return Answer(10.0, [10.0 + first_s], 12.0, tokens, error=error)


def test_what_failed_or_is_too_short_is_unserved_and_its_tokens_count_nothing() -> None:
    asked = [Request([1, 2, 3], 20), Request([2], 20), Request([3], 20)]
    load = LoadResult([answer(20), answer(19), answer(20, error="refused")], elapsed_s=4.0)
    assert turn_of(asked, load) == Turn(tok_s=5.0, work_tok_s=5.75, ttft_s=[1.0], unserved=2)


def turns(*tok_s: float, unserved: int = 0) -> list[Turn]:
    """With prompts the work is three times as much, half of it where some are unserved."""
    return [Turn(each, (1.5 if unserved else 3) * each, [0.1, 0.3], unserved) for each in tok_s]


MEASURED = {
    "mixed": {"none": turns(10, 20, unserved=1), "cache": turns(20, 40), "everything": turns(40, 80)},
    "long": {"none": turns(40, 40), "cache": turns(20, 20), "everything": turns(40, 40, unserved=2)},
    "calm": {"none": turns(100, 100), "cache": turns(90, 90), "everything": turns(99, 97)},
}


def test_ratios_are_of_one_turn_and_their_geometric_mean_is_over_workloads() -> None:
    figures = figures_of(MEASURED, ["mixed", "long"], ["calm"])
    assert figures["vs_none_mixed"] == pytest.approx(4.0)
    assert figures["vs_none"] == pytest.approx(2.0)
    assert figures["vs_best_single"] == pytest.approx(2.0)
    assert figures["work_vs_none_mixed"] == pytest.approx(8.0), "what was refused is not done"
    assert figures["work_vs_none"] == pytest.approx((8 * 0.5) ** 0.5)
    assert figures["harmless"] == pytest.approx(0.98)
    assert (figures["harmless_low"], figures["harmless_high"]) == pytest.approx((0.97, 0.99))
    assert figures["unserved"] == 4 and figures["unserved_mixed_none"] == 2
    assert figures["p99_ttft_s_mixed_none"] == pytest.approx(0.3)
    assert figures["tok_s_mixed_cache"] == pytest.approx(30)
    whole = ("vs_best_single", "vs_none", "work_vs_best_single", "work_vs_none", "harmless")
    assert {f"{name}{end}" for name in whole for end in ("", "_low", "_high")} <= figures.keys()


@pytest.mark.slow
@pytest.mark.stack
def test_a_short_run_serves_everything_and_has_every_figure(tmp_path: Path) -> None:
    words = ["--quick", "--workloads", "mixed", "--singles", "cache", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "together", *words], cwd=ROOT, check=True, timeout=280)
    result = json.loads((tmp_path / "result.json").read_text())
    figures, sides = result["figures"], ("none", "cache", "everything", "ample")
    wanted = {f"{figure}_mixed_{side}" for figure in ("tok_s", "p99_ttft_s", "unserved") for side in sides}
    wanted |= {f"{name}{end}" for name in ("vs_best_single", "vs_none") for end in ("", "_low", "_high")}
    assert wanted | {"unserved"} <= set(figures)
    assert figures["unserved"] == result["failures"] == 0
    assert figures["unserved_mixed_none"] > 0, "prompts that are longer than a worker"
    assert all(figures[f"tok_s_mixed_{side}"] > 0 for side in sides)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == len(sides) * sum(one.few for one in WORKLOADS if one.name == "mixed")
