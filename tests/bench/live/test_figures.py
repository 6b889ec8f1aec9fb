"""What live benches make of answers, faults, frames and refusals; short runs against real stacks."""

import json
import random
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from openai.types import BatchRequestCounts

from bench.cli import main
from bench.kit.load import Answer, LoadResult
from bench.kit.models import TINY_CHAT
from bench.kit.provenance import ROOT
from bench.live.batch import outcome as outcome_of_batch
from bench.live.chaos import Fault, Seen, drawn_faults, longest_pause_s
from bench.live.explain import counted
from bench.live.growth import Growth
from bench.live.migrate.mover import Mover, Watch
from bench.live.overload import Part, is_refused
from bench.live.overload import figures as figures_of_parts
from bench.live.prefix import bench, live
from bench.live.prefix.live import NONE, TIERS, TierCell, block_bytes
from bench.live.prefix.workloads import QUICK, Talked, Templates, requests_of
from bench.live.shadowing import ANSWER_TOKENS, Pauses
from bench.live.shadowing import figures as figures_of_pauses
from bench.live.sim_check import loads
from bench.live.sim_check.costs import Costs, figures, learn, replay, simulated
from bench.live.sim_check.loads import Load, Setting, Step
from bench.live.sim_check.loads import Seen as SeenRequest
from bench.live.structured import fault_of, random_schema
from shared.grammars import Grammars, json_grammar
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMoved
from shared.messages.tokens import TokenDelta, TokenFrame
from shared.tokenizer_files import load_tokenizer
from sim.cores import CoreCosts
from sim.linear_cost import LinearCost
from tests.bench.rig import context_of
from tests.services.placement.rig import listed, report


def answer(tokens: int = 3, text: str = "abc", event_s: tuple[float, ...] = (1.0, 1.1, 1.2)) -> Answer:
    return Answer(0.5, list(event_s), 1.3, tokens, pieces=list(text), choices=[0] * len(text))


def test_every_kind_comes_as_often_as_the_others() -> None:
    faults = drawn_faults(Random(1), 99, fills=True, poisons=True)
    assert [at for at, fault in enumerate(faults) if fault.way == "poison"] == [12, 37, 62, 87]
    kinds = [fault.kind for fault in faults if fault.way not in ("hang", "poison")]
    assert {kinds.count(kind) for kind in set(kinds)} == {5}
    assert {"worker", "nats", "frozen_worker", "frozen_gateway", "pair", "files", "full"} <= set(kinds)
    hung = [fault.victims[0].partition("-")[0] for fault in faults if fault.way == "hang"]
    assert len(hung) == 35 and {hung.count(kind) for kind in {"worker", "nats", "ledger"}} == {5}
    assert all(len(set(fault.victims)) == 2 for fault in faults if fault.kind == "pair")


def test_a_pause_counts_from_the_fault_on() -> None:
    assert longest_pause_s([1.0, 5.0, 5.5, 7.0], 5.2) == pytest.approx(1.5)
    assert longest_pause_s([1.0, 5.0, 5.5], 4.0) == pytest.approx(4.0), "the gap it fell in"


def test_what_is_lost_doubled_or_changed_is_counted_once() -> None:
    seen, fault = Seen(), Fault(("worker-0",))
    failed = answer()
    failed.error = "refused"
    answers = [answer(), answer(text="abd"), answer(4, "abcd"), answer(2, "ab"), failed]
    seen.take(fault, 1.05, answers, [answer()] * 5, [{}] * 5)
    assert (seen.requests, seen.lost, seen.duplicated, seen.changed) == (5, 2, 1, 2)
    assert seen.pauses_s["worker"] == pytest.approx([0.1, 0.1, 0.1])
    seen.take(Fault(way="poison"), 1.05, [answer(), failed], [answer()] * 2, [{}] * 2)
    assert seen.poisoned_others_lost == 1


def test_choices_are_compared_one_by_one_whatever_their_order() -> None:
    seen = Seen()
    one, other = answer(text="abxy"), answer(text="xyab")
    one.choices, other.choices = [0, 0, 1, 1], [1, 1, 0, 0]
    seen.take(None, 0.0, [one], [other], [{"n": 2}])
    assert seen.changed == 0
    other.choices = [0, 0, 1, 1]
    seen.take(None, 0.0, [one], [other], [{"n": 2}])
    assert seen.changed == 1


def test_growth_is_that_of_the_second_half_where_it_is_steepest() -> None:
    growth = Growth()
    for number in range(20):
        growth.note("tasks", ("gateway-0", 1), number * 60.0, 5 + min(number, 10))
        growth.note("tasks", ("worker-0", 2), number * 60.0, 7 + number * 0.5)
        growth.note("tasks", ("worker-0", 3 + number), number * 60.0, 99.0)
    assert growth.figures() == {"growth_tasks_per_h": pytest.approx(30.0)}
    assert [row[:2] for row in growth.rows()] == [("tasks", "worker-0")]
    newest = {"kind": "tasks", "process": "gateway-0", "pid": 1, "at_s": 19 * 60.0, "value": 15}
    assert newest in growth.last() and len(growth.last()) == 3, "a process that has died is not sampled again"


def test_growth_counts_from_the_first_quarter_on_and_no_moments() -> None:
    growth = Growth()
    for minute in range(9):
        growth.note("rss_mb", ("gateway-0", 1), minute * 60.0, 100.0 if minute < 2 else 150.0 + minute)
    growth.note("rss_mb", ("worker-0", 2), 480.0, 900.0)
    growth.samples["rss_mb"]["gateway-0", 1][-1] = 480.0, 400.0
    assert growth.figures()["grown_mb_most"] == 4.0


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("flags", [(), ("--tight",)])
def test_a_short_run_loses_and_changes_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    words = ["--faults", "3", *flags, "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "chaos", *words], cwd=ROOT, check=True, timeout=280)
    figures = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert (figures["faults"], figures["requests"]) == (3, 24)
    assert figures["lost"] == figures["duplicated"] == figures["changed"] == figures["invalid"] == 0


def broken_off(event_s: list[float], *, tokens: int = ANSWER_TOKENS, text: str = "a") -> Answer:
    return Answer(0.0, event_s=event_s, completion_tokens=tokens, pieces=[text], choices=[0])


def test_a_pause_is_told_in_seconds_and_in_steps_of_its_answer() -> None:
    one = Pauses()
    one.take(broken_off([1.0, 1.1, 1.2, 1.3, 1.8, 1.9]), killed_s=1.35, wanted="a")
    assert one.pauses_s == [pytest.approx(0.5)] and one.steps == [pytest.approx(5.0)]
    found = figures_of_pauses({"shadow": one, "unshadowed": Pauses()})
    assert found["pause_p99_s_shadow_4k"] == pytest.approx(0.5)
    assert found["pause_p99_steps_shadow_4k"] == pytest.approx(5.0)
    assert "pause_p99_s_unshadowed_4k" not in found and found["unshadowed_lost"] == 0


def test_what_is_lost_or_changed_is_counted() -> None:
    one = Pauses()
    one.take(broken_off([1.0, 2.0, 3.0], tokens=3), killed_s=1.5, wanted="a")
    one.take(broken_off([1.0, 2.0, 3.0], text="b"), killed_s=2.5, wanted="a")
    assert (one.lost, one.changed, len(one.pauses_s)) == (1, 1, 1)


def test_what_is_refused_has_not_failed() -> None:
    """A prompt longer than what is left of the fleet is refused, as it has to be."""
    errors = ("", "status 400: context_length_exceeded", "status 500: internal_error", "connection: reset")
    answers = []
    for error in errors:
        answer = Answer(sent_s=0.0)
        answer.error = error
        answers.append(answer)
    assert counted(answers) == (1, 2)


def served(sent_s: float, took_s: float = 1.0, tokens: int = 10, error: str = "") -> Answer:
    ended_s = sent_s + took_s
    event_s = [] if error else [sent_s + took_s / 2]
    return Answer(sent_s, event_s, ended_s, tokens, prompt_tokens=30, error=error)


REFUSED = 'status 429: {"error":{"message":"all workers are busy"}}'


def test_goodput_is_what_was_completed_within_the_window() -> None:
    answers = [
        served(0.0),
        served(9.5),
        served(12.0),
        served(19.5),
        served(13.0, 0.01, error=REFUSED),
        served(14.0, 0.03, error=REFUSED),
        served(15.0, error="connection lost"),
    ]
    part = Part(answers, 10.0, 20.0)
    assert len(part.ended) == 2 and part.requests_per_s == pytest.approx(0.2)
    assert part.tokens_per_s == pytest.approx(2 * 40 / 10.0)
    assert (len(part.refused), len(part.failed), len(part.sent)) == (2, 1, 5)


def test_only_what_is_told_to_come_again_is_a_refusal() -> None:
    assert is_refused(served(0.0, error=REFUSED)) and is_refused(served(0.0, error="status 503: away"))
    assert not is_refused(served(0.0, error="status 500: broken")) and not is_refused(served(0.0))


def test_figures_are_ratios_of_the_parts() -> None:
    peak = Part([served(float(at)) for at in range(10)], 0.0, 10.0)
    over = Part([*peak.answers, *(served(5.0, 0.001 * at, error=REFUSED) for at in range(1, 101))], 0.0, 10.0)
    busy = Part([served(1.0, 2.0)], 0.0, 10.0)
    flooded = Part([served(1.0, 2.1), served(2.0, 0.01, error=REFUSED)], 0.0, 10.0)
    found = figures_of_parts(peak, over, busy, flooded)
    assert found["goodput_ratio"] == pytest.approx(1.0) and found["refusal_ms_p99"] == pytest.approx(99.0)
    assert found["flood_p99_ratio"] == pytest.approx(1.05) and found["steady_refused"] == 1.0
    assert found["refused_share"] == pytest.approx(100 / 110)
    assert "refusal_ms_p99" not in figures_of_parts(peak, peak, busy, busy)


@pytest.mark.slow
@pytest.mark.stack
def test_a_short_run_refuses_early_and_fails_nobody(tmp_path: Path) -> None:
    words = ["--quick", "--engine", "simulated", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "overload", *words], cwd=ROOT, check=True, timeout=400)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failures"] == 0
    found = result["figures"]
    assert found["goodput_ratio"] > 0.8 and found["refused_share"] > 0.1
    assert found["refusal_ms_p50"] < 1000 and found["steady_refused"] == 0


KEY = ("req_1", 0)


def frame(attempt: int, first: int, count: int = 1) -> TokenFrame:
    return TokenFrame("w", 1, (TokenDelta(*KEY, attempt, first, tuple(range(count))),))


def watched(monkeypatch: pytest.MonkeyPatch, *seen: tuple[float, int, int]) -> Watch:
    """(time, attempt, index) of tokens."""
    times = iter([at_s for at_s, _, _ in seen])
    monkeypatch.setattr("bench.live.migrate.mover.time.perf_counter", lambda: next(times))
    watch = Watch()
    for _, attempt, first in seen:
        watch.on_frame(frame(attempt, first))
    return watch


def test_a_pause_ends_with_the_first_of_the_next_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ((0.0, 1, 0), (0.1, 1, 1), (0.2, 1, 2), (0.5, 2, 3), (0.6, 2, 4))
    watch = watched(monkeypatch, *seen)
    found = watch.pause(KEY, 1)
    assert found is not None and found.pause_s == pytest.approx(0.3) and found.step_s == pytest.approx(0.1)
    assert watch.pause(KEY, 2) is None and watch.pause(("other", 0), 1) is None


class FakeBus:
    """Takes every order but the first."""

    def __init__(self) -> None:
        self.orders: list[MoveSequences] = []

    async def request(self, subject: str, order: MoveSequences, reply: object, **_: Any) -> MovesTaken:
        self.orders.append(order)
        return MovesTaken(refusals=("busy" if len(self.orders) == 1 else "",))


async def test_the_mover_moves_what_runs_to_the_next_worker_once_at_a_time() -> None:
    bus: Any = FakeBus()
    mover = Mover(bus, "tokens")
    mover.on_reported(report("w0", sequences=(listed("a"), listed("b"))))
    mover.on_reported(report("w1"))
    assert not mover.running(), "nothing was generated yet"
    assert await mover.move_one(least_generated=0) and mover.refusals == ["busy"] and mover.under_way == 1
    target = bus.orders[-1].moves[0]
    assert (target.ref.request_id, target.target) == ("b", "w1")
    assert [listed.ref.request_id for _, listed in mover.running(least_generated=0)] == ["a"]
    mover.on_moved(SequenceMoved(ref=target.ref, source="w0", target="w1"))
    mover.on_moved(SequenceMoved(ref=target.ref, source="w0", target="w1", reason="late"))
    assert mover.under_way == 0 and len(mover.done) == 1
    await mover.until_over(2, within_s=1)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer("models/tiny_chat"))


def test_what_is_drawn_can_be_answered(grammars: Grammars) -> None:
    draw = random.Random(7)
    for _ in range(100):
        schema = random_schema(draw, depth=2)
        jsonschema.Draft202012Validator.check_schema(schema)
        grammars.check(json_grammar(schema))


def test_faults() -> None:
    schema = {"type": "integer"}
    assert fault_of(Answer(0.0, pieces=["12"]), schema) == ""
    assert fault_of(Answer(0.0, pieces=["1", "x"], finish_reason="length"), schema).startswith("length")
    assert fault_of(Answer(0.0, pieces=['"a"']), schema)
    assert fault_of(Answer(0.0, pieces=["2.0"]), schema) == ""
    assert fault_of(Answer(0.0, pieces=["9.7305"]), {"multipleOf": 0.0001}) == ""
    assert fault_of(Answer(0.0, pieces=["9.73055"]), {"multipleOf": 0.0001})
    assert fault_of(Answer(0.0, error="connection lost"), schema) == "connection lost"


def served_load(elapsed_s: float, cached: int = 0, error: str = "") -> LoadResult:
    known: dict[str, Any] = {"completion_tokens": 10, "prompt_tokens": 90, "cached_tokens": cached}
    answers = [Answer(0.0, [0.1], 1.0, error=error, **known) for _ in range(4)]
    return LoadResult(answers, elapsed_s)


def test_tiers_are_as_large_as_the_paper_says(tmp_path: Path) -> None:
    shape, size = Templates(), block_bytes(TINY_CHAT)
    assert size == 8 * 2 * 2 * 64 * 16 * 4
    settings = TierCell(TIERS[-1], "fpf", prefetch=False).settings(shape, size, tmp_path)
    assert settings["worker.host_memory.blocks"] == 32 * 25
    disk_mb = settings["worker.prefix_cache.disk_mb"]
    assert isinstance(disk_mb, int) and 0 <= disk_mb * 2**20 - 128 * 25 * size < 2 * 2**20 + size
    assert settings["worker.prefix_cache.lookahead_sequences"] == 0 and settings["placement.order"] == "fpf"
    assert "worker.prefix_cache.disk_mb" not in TierCell(TIERS[1]).settings(shape, size, tmp_path)


def test_requests_share_their_prefix_and_nothing_else() -> None:
    made = requests_of(QUICK, 4096, random.Random(1))
    assert len(made.first) == QUICK.prefixes and len(made.measured) == QUICK.requests
    known = {tuple(body["prompt"][: QUICK.prefix_tokens]) for body in made.first}
    assert len(known) == QUICK.prefixes
    assert {tuple(body["prompt"][: QUICK.prefix_tokens]) for body in made.measured} <= known
    whole = {tuple(body["prompt"]) for body in made.first + made.measured}
    assert len(whole) == QUICK.prefixes + QUICK.requests


def test_text_is_compared_with_the_median_without_a_cache(tmp_path: Path) -> None:
    measured = [live.Measured(TierCell(NONE), served_load(seconds), {}) for seconds in (4.0, 2.0, 2.0)]
    measured.append(live.Measured(TierCell(TIERS[-1]), served_load(0.5, 45), {"device": 3}))
    outcome = live._text_outcome(context_of("prefix", tmp_path, "--no-simulated"), measured)
    assert outcome.figures["text_throughput_vs_none"] == pytest.approx(4.0) and outcome.failures == 0
    assert (tmp_path / "text_analysis.png").stat().st_size > 1000


def test_chats_are_compared_side_by_side() -> None:
    talks = {"without": [Talked(served_load(2.0), 0.4)], "with": [Talked(served_load(1.0, 30, "x"), 0.1)]}
    outcome = live._chat_outcome(talks)
    assert outcome.figures["chat_throughput_vs_none"] == pytest.approx(2.0)
    assert outcome.figures["chat_later_ttft_vs_none"] == pytest.approx(0.25)
    assert outcome.figures["chat_cached_share"] == pytest.approx(30 / 90) and outcome.failures == 4


@pytest.mark.slow
def test_a_quick_live_run(tmp_path: Path) -> None:
    outcome = bench.run(context_of("prefix", tmp_path, "--no-simulated"))
    assert outcome.failures == 0 and outcome.figures["text_throughput_vs_none"] > 1.0
    assert outcome.figures["chat_cached_share"] > 0.3 and (tmp_path / "text_analysis.png").exists()
    assert not (tmp_path / "kv").exists()


SETTING = Setting(workers=1, kv_blocks=256, sequences=32, policy="vllm", max_tokens=256, cores=2)
TRUE = Costs(
    LinearCost("a machine", fixed_s=0.002, prefill_token_s=5e-5, sequence_s=1e-4),
    CoreCosts(cores=2, request_s=0.0, token_s=2e-4, lanes=2.0, ratios=(0.8, 1.0, 1.0, 1.2), frame_s=5e-4),
    overhead_s=0.004,
)
"""Of a machine that is itself simulated: what it costs is known."""


def load_of(kind: str, percent: int, rate: float, seed: int, count: int = 150) -> Load:
    """As that machine would have served it."""
    dice, at_s, asked = Random(seed), 0.0, list[SeenRequest]()
    for _ in range(count):
        at_s += dice.expovariate(rate)
        asked.append(SeenRequest(at_s, 0.0, 0.0, dice.randint(10, 150), dice.randint(5, 90)))
    blank = Load(kind, percent, 0, at_s, 0.0, 0.0, asked, [])
    answers = replay(blank, TRUE, SETTING)
    steps = sum(meter.steps for meter in simulated(blank, TRUE, SETTING).meters)
    prompts, tokens = sum(one.prompt_tokens for one in answers), sum(one.output_tokens for one in answers)
    engine_s = steps * TRUE.step.fixed_s + prompts * TRUE.step.prefill_token_s + tokens * TRUE.step.sequence_s
    rest_s = steps * TRUE.rest.frame_s + tokens * TRUE.rest.token_s
    reports = [_step(number, dice) for number in range(1, steps + 1)]
    return Load(kind, percent, 0, at_s, engine_s, rest_s, answers, reports)


def _step(number: int, dice: Random) -> Step:
    """A fifth shorter than its cost: so much is done between two steps, say."""
    prefilled, decoded = dice.choice((0, 0, 40, 120)), dice.randint(1, 20)
    took_s = 0.8 * TRUE.step.step_s([(0, prefilled)] if prefilled else [], decoded, 0)
    ratio = dice.choice(TRUE.rest.ratios)
    return Step(0.05 * number, "worker-0", number, number, 1, prefilled, decoded, 0, ratio * took_s)


def test_costs_of_a_machine_are_found_from_what_its_lessons_took() -> None:
    """Reports say a fifth too little, CPU times do not. A load that is no lesson is predicted to what errors
    of `lanes` and 150 requests leave."""
    lessons = [load_of("lesson", 35, 8.0, 1), load_of("lesson", 65, 15.0, 2)]
    costs = learn(lessons, SETTING)
    assert costs.rest.token_s == pytest.approx(TRUE.rest.token_s, rel=1e-6)
    assert costs.rest.frame_s == pytest.approx(TRUE.rest.frame_s, rel=1e-6)
    assert costs.step.fixed_s == pytest.approx(TRUE.step.fixed_s, rel=0.2)
    load = load_of("predicted", 50, 11.0, 3)
    live, made = figures(load.answers), figures(replay(load, costs, SETTING))
    assert made["throughput"] == pytest.approx(live["throughput"], rel=0.03)
    for name in ("ttft_p50", "latency_p50", "latency_p99"):
        assert made[name] == pytest.approx(live[name], rel=0.15), name


@pytest.mark.slow
@pytest.mark.stack
def test_a_live_run_is_replayed(tmp_path: Path) -> None:
    words = ["sim-check", "--quick", "--requests", "24", "--max-tokens", "48"]
    assert main([*words, "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures_ = result["figures"]
    assert result["failures"] == 0 and figures_["step_fixed_ms"] > 0
    assert abs(figures_["throughput_error_50"]) < 0.9
    assert {"ttft_p99_error_50", "latency_p50_error_50"} <= figures_.keys()
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and all(0 < row["live_ttft_s"] <= row["live_jct_s"] for row in rows)
    assert all(row["simulated_jct_s"] > 0 for row in rows)
    again = ["sim-check", "--loads", str(tmp_path / loads.FILE), "--json", str(tmp_path / "again.json")]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["figures"] == figures_


def test_chats_beside_a_batch_are_compared_with_those_before_and_after_it() -> None:
    def chats(seconds: float) -> list[Answer]:
        return [Answer(0.0, event_s=[seconds / 2], ended_s=seconds)] * 10

    parts = {"alone": chats(1.0), "beside the batch": chats(3.0), "alone again": chats(2.0)}
    parts["beside the batch"].append(Answer(0.0, error="connection: reset"))
    found = outcome_of_batch(parts, BatchRequestCounts(completed=58, failed=1, total=60), 30, 9.0)
    assert found.figures["end_to_end_p99_ratio"] == found.figures["first_token_p99_ratio"] == 1.5
    assert found.figures["end_to_end_p50_ratio"] == 3.0
    assert found.failures == 3 and found.figures["batch_completed"] == 58
