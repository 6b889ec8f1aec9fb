"""Benches in the simulator on little: their figures, their pictures, and what counts as a failure."""

import json
import random
from pathlib import Path

import pytest

from bench.cli import main
from bench.live.prefix import bench as prefix_bench
from bench.simulated import prefix
from bench.simulated.ecoserve import sides
from bench.simulated.ecoserve.comparison import CURVE, Comparison, Effort, add_curves, compare
from bench.simulated.ecoserve.measures import Reference
from bench.simulated.ecoserve.sides import RIVALS, PolicySide, case_of
from bench.simulated.pie import Question, answer, figure4
from bench.simulated.placement import bench as placement
from bench.simulated.placement import replay as placement_replay
from bench.simulated.placement.jobs import A100, Job, Workload, make_jobs
from bench.simulated.placement.replay import BEST_FIT, MELL, MELL_BY_OPERATION, SIDES
from bench.simulated.prefix import (
    BELADY,
    Chain,
    Conversations,
    Sizes,
    generate,
    infinite_hit_rate,
    read_mooncake,
    replay,
)
from services.worker.kv.core.eviction import ORDERS
from services.worker.kv.core.prefix_cache import PrefixCache
from sim.case import Case, Machine
from sim.summary import ServiceLevel
from sim.workloads import Source
from tests.bench.rig import context_of


def test_a_short_run(tmp_path: Path) -> None:
    words = ["dgfm", "--quick", "--duration-s", "60", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is True and 0.5 < figures["throughput_vs_off"] < 2
    assert 0 <= figures["remote_share_on"] <= figures["remote_share_off"] + 0.05
    assert 0 < figures["settle_10k_s"] < 5 and (tmp_path / "figure10.png").stat().st_size > 1000
    sides = [json.loads(line)["side"] for line in (tmp_path / "sides.jsonl").read_text().splitlines()]
    assert sides == ["off", "cycles", "on"]


def test_flags_that_leave_nothing_are_wrong(tmp_path: Path) -> None:
    assert main(["dgfm", "--workers", "1", "--out", str(tmp_path)]) == 2


def test_a_small_comparison(tmp_path: Path) -> None:
    words = ["sim-ecoserve", "--quick", "--traces", "alpaca", "--requests", "20", "--processes", "1"]
    words += ["--policies", "vllm", "ecoserve", "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is True and 0.2 < figures["rate_vs_vllm_alpaca"] < 5
    assert {"slo_vs_vllm_alpaca", "oracle_gap", "kvc_utilization", "alloc_failures"} <= figures.keys()
    sides = [json.loads(line) for line in (tmp_path / "sides.jsonl").read_text().splitlines()]
    assert {side["side"] for side in sides} == {"vllm", "vllm whole prompts", "ecoserve", "ecoserve oracle"}
    assert all(0 <= side["slo"] <= 1 for side in sides)


def test_the_peer_is_the_better_of_its_settings() -> None:
    reference = Reference(2.0, 0.1, ServiceLevel(0.1, 0.02), 10.0)
    knees = {"vllm": 2.0, "vllm whole prompts": 2.5, "ecoserve": 5.0, "orca": 0.0}
    past_knee = {"vllm whole prompts": {"slo": 0.25}, "ecoserve": {"slo": 1.0}}
    one = Comparison(Source("alpaca"), reference, knees, 10, past_knee=past_knee)
    assert one.peer == "vllm whole prompts" and one.rate_ratio("ecoserve", "vllm") == 2.0
    assert one.rate_ratio("ecoserve", "orca") is None and one.stable_ratio("ecoserve", "vllm") is None
    assert one.slo_ratio("ecoserve") == 4.0


def test_pictures(tmp_path: Path) -> None:
    words = "sim-ecoserve --traces alpaca --requests 30 --seeds 1 --duration 1 --processes 1".split()
    words += ["--policies", "ecoserve", "--out", str(tmp_path)]
    assert main(words) == 0
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert {"latency_alpaca", "jct_alpaca", "ablation_alpaca"} <= drawn


def test_sides_are_compared_on_the_same_requests() -> None:
    names = {"vllm": "vllm", "twin": "vllm", "orca": "orca"}
    sides = [PolicySide(label, policy, "none") for label, policy in names.items()]
    effort, told = Effort(requests=40, duration_s=1.0, seeds=(0,), processes=1), list[str]()
    (one,) = compare([Source("alpaca")], sides, Machine(), effort, told.append)
    assert one.requests == 40 and one.knees["vllm"] == one.knees["twin"] > one.knees["orca"]
    assert all(one.stable[label] <= rate for label, rate in one.knees.items())
    assert one.past_knee["vllm"]["jct_s"] == one.past_knee["twin"]["jct_s"] < one.past_knee["orca"]["jct_s"]
    assert one.peer == "vllm" and one.rate_ratio("twin", "vllm") == 1.0 and len(told) == 3 * len(sides)
    add_curves([one], sides[:1], Machine(), effort, told.append)
    assert len(one.curves["vllm"]) == len(CURVE) and one.curves["vllm"][0][1] <= one.curves["vllm"][-1][1]


PEER = Case(Source("alpaca"), "vllm", "none", requests=150)


def test_each_side_has_the_settings_of_the_paper() -> None:
    made = {
        side.label: case_of(side, Source("books"), Machine(), requests=9, seed=1)
        for side in (*RIVALS, PolicySide("ecoserve", "ecoserve"))
    }
    assert made["orca"].settings.max_batch_sequences == 8 and made["vllm"].settings.max_batch_sequences == 256
    assert dict(made["ecoserve"].options) == sides.SETTINGS["books"] and made["vllm"].options == ()
    assert made["vllm"].chunked_prefill and not made["vllm whole prompts"].chunked_prefill


def test_figure_4_of_pie() -> None:
    figures = figure4()
    found = [figures[f"fig4_{name}"] for name in ("expansion", "stalls", "fifo_layer_times")]
    assert found == [1.286, 0, 8] and figures["fig4_stalls_six_slots"] > 0
    assert figures["fig4_layers_in"] >= 4


def question(path: Path, fifo_layers: int | None) -> Question:
    rows = [f"{20 + 7 * (i % 30)},{30 + 11 * (i % 20)}" for i in range(80)] + ["1500,10"]
    trace = path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return Question("opt-13b", Source(path=trace), 2.0, 50.0, fifo_layers, 80, 0)


def test_pie_serves_more_on_the_same_bytes(tmp_path: Path) -> None:
    plain, fixed, adaptive = (answer(question(tmp_path, q)) for q in (0, 20, None))
    assert fixed.tokens_per_s > 1.1 * plain.tokens_per_s and adaptive.tokens_per_s > plain.tokens_per_s
    assert adaptive.stall_share <= 0.02
    assert max(length for _, length in adaptive.lengths) >= 3


def jobs(duration_s: float = 120.0, rate_per_s: float | None = 0.5) -> list[Job]:
    workload = Workload("w", "w", rate_per_s, duration_s)
    return make_jobs(workload, A100, data=None, source=None, seed=3)[0]


def test_sides_see_the_same_jobs_and_batching_saves_moves() -> None:
    conversations = jobs(500.0)
    tallies = {s.label: s.run(conversations, A100, 200.0) for s in (MELL, MELL_BY_OPERATION, BEST_FIT)}
    volumes = {round(tally.volume, 6) for tally in tallies.values()}
    assert len(volumes) == 1
    mell, single, tight = (tallies[side.label] for side in (MELL, MELL_BY_OPERATION, BEST_FIT))
    assert mell.mean_gpus() < tight.mean_gpus() and mell.recomputes == 0 < tight.recomputes
    assert mell.moves < single.moves and single.moves_max <= 10
    assert all(tally.waits == 0 for tally in tallies.values())


def test_figures_have_the_agreed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "WARM_UP_S", 60.0)
    monkeypatch.setattr(placement, "QUICK_AZURE_S", 120.0)
    words = ("--duration", "120", "--gpus", "10", "40")
    outcome = placement.run(context_of("placement", tmp_path, *words, seed=7))
    agreed = {"gpus_vs_ideal", "gpus_vs_bf", "gpus_vs_wf", "gpus_vs_lb", "utilization", "migrations_vs_lb"}
    agreed |= {"worst_ratio", "moves_max", "ops_per_s"}
    assert agreed <= set(outcome.figures) and set(placement.HEADLINE) <= set(outcome.figures)
    assert outcome.simulated and outcome.failures == 0 and len(outcome.tables[0].rows) == len(SIDES)


def test_with_migration_more_requests_keep_their_kv() -> None:
    """Two GPUs that two growing conversations each fill: without a move the youngest lose what they had."""
    growing = [Job(index, float(index), 1600, 4000, 8000) for index in range(8)]
    found = placement_replay.measure(growing, A100, 2.0)
    by_policy = {one.policy: one for one in found if one.load == 1.0}
    assert by_policy["mell"].served >= max(by_policy[name].served for name in placement_replay.WITHOUT)
    assert all(0 < one.ratio <= 1 and one.requests == 8 for one in found)
    made = placement_replay.figures(found)
    assert made["served_gain_1"] >= 1
    assert {f"served_mell_{load:g}" for load in placement_replay.LOADS} <= made.keys()


ALONE = ("--processes", "1")


def test_a_run_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_QUICK_REQUESTS", 900)
    words = (*ALONE, "--no-live", "--trace", "chats", "--sizes", "800")
    outcome = prefix_bench.run(context_of("prefix", tmp_path, *words))
    figures = outcome.figures
    assert figures["hit_rate_lru_800"] < figures["hit_rate_frequent_800"] < figures["hit_rate_belady_800"]
    assert figures["hit_rate_belady_800"] < figures["hit_rate_infinite"]
    assert figures["hit_rate"] == figures["hit_rate_frequent_800"]
    assert figures["hit_vs_infinite"] < figures["hit_vs_belady_800"] < 1 < figures["hit_vs_lru"]
    assert outcome.failures == 0 and outcome.simulated
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 10
    assert (tmp_path / "hit_rates.png").stat().st_size > 1000


def test_no_better_than_lru_is_a_failure_unless_nothing_could_be() -> None:
    best = {**dict.fromkeys(prefix.POLICIES, 0.4), "lru": 0.3}
    same = {**best, prefix.OURS: 0.3}
    everything = dict.fromkeys(prefix.POLICIES, 0.5)
    outcome = prefix.outcome_of("t", 0.5, {Sizes(10): same, Sizes(5, 20): best, Sizes(90): everything})
    assert outcome.failures == 1 and outcome.figures["hit_vs_lru"] == 1.0
    assert outcome.figures["hit_vs_infinite_90"] == 1.0
    assert any("not better than LRU at 10" in note for note in outcome.notes)


@pytest.mark.parametrize("line", ["{}", "no json", '{"hash_ids": [-1]}', '{"hash_ids": 3}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1]}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_mooncake(file)


@pytest.fixture(scope="module")
def trace() -> list[Chain]:
    return generate(Conversations(), 400, random.Random(5))


def chains(*prompts: str) -> list[Chain]:
    return [tuple(prompt[: end + 1].encode() for end in range(len(prompt))) for prompt in prompts]


@pytest.mark.parametrize("policy", [*ORDERS, BELADY])
def test_a_cache_that_holds_everything_finds_everything(trace: list[Chain], policy: str) -> None:
    replayed = replay(trace, Sizes(100_000), policy)
    assert replayed.hit_rate == pytest.approx(infinite_hit_rate(trace))
    assert replayed.asked == sum(map(len, trace))


@pytest.mark.parametrize("policy", ORDERS)
def test_belady_finds_most(trace: list[Chain], policy: str) -> None:
    assert replay(trace, Sizes(400), policy).hit_rate < replay(trace, Sizes(400), BELADY).hit_rate


@pytest.mark.parametrize("blocks", [400, 1200])
def test_our_order_finds_more_than_lru(blocks: int) -> None:
    made = generate(Conversations(), 1200, random.Random(6))
    ours, lru = (replay(made, Sizes(blocks), policy).hit_rate for policy in ("frequent", "lru"))
    assert ours > lru


def test_tiers_stay_consistent(trace: list[Chain]) -> None:
    def check(cache: PrefixCache) -> None:
        cache.check_integrity([])

    tiered = replay(trace[:60], Sizes(150, 300, 900), "frequent", after_each=check)
    assert tiered.found[1] > 0
