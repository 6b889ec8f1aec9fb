"""Faults of every kind, pauses where they belong, and a short run against real kills."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from bench.kit.load import Answer
from bench.kit.provenance import ROOT
from bench.live.chaos import Fault, Seen, drawn_faults, longest_pause_s
from bench.live.growth import Growth


def answer(tokens: int = 3, text: str = "abc", event_s: tuple[float, ...] = (1.0, 1.1, 1.2)) -> Answer:
    return Answer(0.5, list(event_s), 1.3, tokens, pieces=list(text), choices=[0] * len(text))


def test_every_kind_comes_as_often_as_the_others() -> None:
    faults = drawn_faults(Random(1), 100)
    kinds = [fault.kind for fault in faults]
    assert {kinds.count(kind) for kind in set(kinds)} == {10}
    assert {"worker", "scheduler", "nats", "frozen_worker", "frozen_gateway", "pair"} <= set(kinds)
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


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("flags", [(), ("--tight",)])
def test_a_short_run_loses_and_changes_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    words = ["--faults", "3", *flags, "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "chaos", *words], cwd=ROOT, check=True, timeout=280)
    figures = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert (figures["faults"], figures["requests"]) == (3, 24)
    assert figures["lost"] == figures["duplicated"] == figures["changed"] == figures["invalid"] == 0
