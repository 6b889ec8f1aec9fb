"""`bench together`, `dgfm` and `overhead`: sides and loads, what they make of turns, and short runs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from bench.cli import main
from bench.kit.load import Answer, LoadResult
from bench.kit.provenance import ROOT
from bench.kit.stacks import CACHE, OFF
from bench.live.dgfm import LONGEST_TOKENS, LiveRun, _Witness, bodies, settings, table_of
from bench.live.dgfm import figures_of as figures_of_sides
from bench.live.overhead.direct import run_direct
from bench.live.together.bench import SIDES, turn_of
from bench.live.together.figures import EVERYTHING, Turn, figures_of
from bench.live.together.workloads import BLOCK_TOKENS, KV_BLOCKS, WORKERS, WORKLOADS, Request, Workload
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from services.worker.core.sampling import Sampled
from services.worker.engine.contract import Row
from shared.config import load
from shared.errors import InternalError
from tests.services.ledger.builders import report

ONE_WORKER_TOKENS = KV_BLOCKS * BLOCK_TOKENS


def test_every_side_has_settings_that_there_are() -> None:
    for name, chosen in SIDES.items():
        assert chosen.keys() >= OFF.keys() or name == EVERYTHING, name
        variables = {f"KVASIR_{key.replace('.', '__').upper()}": str(value) for key, value in chosen.items()}
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
    assert figures["vs_none_mixed"] == pytest.approx(4.0) and figures["vs_none"] == pytest.approx(2.0)
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
    assert wanted | {"unserved"} <= set(figures) and figures["unserved"] == result["failures"] == 0
    assert figures["unserved_mixed_none"] > 0, "prompts that are longer than a worker"
    assert all(figures[f"tok_s_mixed_{side}"] > 0 for side in sides)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == len(sides) * sum(one.few for one in WORKLOADS if one.name == "mixed")


def heard(borrowed: int, idle: int) -> _Witness:
    witness = _Witness()
    witness.on_reported(report("w0", total=20, free=4, borrowed=borrowed, borrowed_free=idle))
    witness.begin()
    return witness


def test_borrowed_blocks_in_use_are_remote() -> None:
    assert heard(borrowed=3, idle=1).used_blocks() == (2, 16)
    assert heard(borrowed=3, idle=3).used_blocks()[0] == 0


COUNTS = {"settlements": 2, "settlements_aborted": 1, "settled_blocks": 7, "recalled_blocks": 3}


def run_of(tokens: int, remote: int) -> LiveRun:
    return LiveRun(10.0, [(1.0, 99), (5.0, tokens)], [(1.0, 9, 10), (5.0, remote, 100)], 4, [], COUNTS)


def test_all_tokens_are_compared_and_the_start_does_not_count() -> None:
    results = {
        "off": [run_of(80, 40), run_of(160, 40)],
        "cycles": [run_of(88, 30), run_of(160, 30)],
        "on": [run_of(96, 20), run_of(240, 20)],
    }
    figures = figures_of_sides(results, 2.0)
    assert figures["throughput_vs_off"] == pytest.approx(336 / 240)
    assert figures["throughput_vs_off_worst"] == pytest.approx(1.2)
    assert figures["throughput_vs_off_best"] == pytest.approx(1.5)
    assert figures["throughput_vs_off_cycles"] == pytest.approx(248 / 240)
    assert [figures[f"remote_share_{side}"] for side in results] == [0.4, 0.3, 0.2]
    assert figures["settled_blocks_on"] == 7 and "settlements_off" not in figures
    assert [row[:2] for row in table_of(results, 2.0).rows] == [(s, at) for s in results for at in range(2)]


@pytest.mark.parametrize("flags", [["--duration-s", "2"], ["--seeds", "-1"]])
def test_flags_that_leave_nothing_are_refused(tmp_path: Path, flags: list[str]) -> None:
    assert main(["dgfm", "--live", *flags, "--out", str(tmp_path)]) == 2


def test_sides_get_the_same_requests_and_differ_in_two_settings() -> None:
    first, again = (list(islice(bodies(Random("r"), 500, 0.06), 200)) for _ in range(2))
    assert first == again
    lengths = [len(body["prompt"]) for body in first]
    assert 0 < sum(length >= 500 for length in lengths) < 40
    assert max(len(body["prompt"]) + body["max_tokens"] for body in first) <= LONGEST_TOKENS
    off, on = settings(settles=False, recalls=False), settings(settles=True, recalls=True)
    assert {key for key in off if off[key] != on[key]} == {"worker.lending.recall", "ledger.settle"}


TINY_CHAT = Path(__file__).parents[3] / "models" / "tiny_chat"


class AddingEngine:
    """Answers a sequence of sum s with s, 2s, 4s … (mod 97); every iteration takes a second."""

    vocabulary = 97
    max_positions = 256
    block_tokens = 4
    weights = ""
    prefill_tokens_per_s = 0.0
    carries = (0, 0)

    def __init__(self, kv_blocks: int = 64) -> None:
        self.kv_blocks = kv_blocks
        self.now_s = 0.0
        self.steps: list[int] = []
        self.written: dict[int, int] = {}

    def clock(self) -> float:
        return self.now_s

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        self.now_s += 1.0
        self.steps.append(sum(len(row.tokens) for row in rows))
        for row in rows:
            assert len(row.blocks) * self.block_tokens >= row.first_position + len(row.tokens)
            for offset, token in enumerate(row.tokens):
                slot = row.first_position + offset
                self.written[row.blocks[slot // self.block_tokens] * self.block_tokens + slot % 4] = token
        return [self._next(row) if row.point is not None else None for row in rows]

    def _next(self, row: Row) -> Sampled:
        """From the KV alone, so that a row in a wrong block or at a wrong position shows."""
        end = row.first_position + len(row.tokens)
        return Sampled(sum(self.written[row.blocks[at // 4] * 4 + at % 4] for at in range(end)) % 97)


def test_direct_calls_answer_every_prompt_in_full() -> None:
    engine = AddingEngine()
    one, two = run_direct(engine, [[1, 2, 3], [5] * 9], 6, 8, engine.clock)
    assert one.tokens == [1, 2, 3, 6, 12, 24, 48, 96, 95] and two.tokens[9:] == [45, 90, 83, 69, 41, 82]
    assert one.token_s == two.token_s == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert engine.steps == [12, 2, 2, 2, 2, 2]


def test_preempted_sequences_are_computed_again() -> None:
    roomy, tight = AddingEngine(), AddingEngine(kv_blocks=7)
    prompts = [[number + 1] * 6 for number in range(3)]
    expected = [one.tokens for one in run_direct(roomy, prompts, 8, 8, roomy.clock)]
    assert [one.tokens for one in run_direct(tight, prompts, 8, 8, tight.clock)] == expected
    assert sum(tight.steps) > sum(roomy.steps)


def test_a_prompt_that_never_fits_is_an_error() -> None:
    engine = AddingEngine(kv_blocks=2)
    with pytest.raises(InternalError, match="more KV"):
        run_direct(engine, [[1] * 20], 4, 8, engine.clock)


@pytest.mark.slow
@pytest.mark.stack
def test_a_short_run_yields_every_figure(tmp_path: Path) -> None:
    words = ["--quick", "--alternations", "1", "--output-tokens", "8", "--streams", "24"]
    target = tmp_path / "result.json"
    argv = [sys.executable, "-m", "bench", "overhead", *words, "--out", str(tmp_path), "--json", str(target)]
    subprocess.run(argv, cwd=TINY_CHAT.parents[1], check=True, timeout=110)
    document = json.loads(target.read_text())
    figures = document["figures"]
    assert document["failures"] == 0 and figures["streams"] == 24
    wanted = {"added_ttft_ms_p50", "added_itl_ms_p50", "tok_s_ratio", "peak_rss_mb_gateway"}
    assert wanted <= set(figures) and figures["tok_s_ratio"] > 0.05 and figures["engine_idle_share_b32"] < 0.9
