"""Faults of every kind, pauses where they belong, and a short run against real kills."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from bench.kit.load import Answer
from bench.kit.provenance import ROOT
from bench.live.chaos import (
    LONG_TOKENS,
    SCHEMA,
    Fault,
    Seen,
    drawn_bodies,
    drawn_faults,
    longest_pause_s,
    work_table,
)
from bench.live.growth import Growth, slope_per_h


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


def test_streams_that_had_ended_or_not_begun_tell_nothing_of_a_fault() -> None:
    seen = Seen()
    for at_s in (0.9, 1.2, 9.0):
        seen.take(Fault(("nats",)), at_s, [answer()], [answer()], [{}])
    assert not seen.pauses_s["nats"]


def test_choices_are_compared_one_by_one_whatever_their_order() -> None:
    seen = Seen()
    one, other = answer(text="abxy"), answer(text="xyab")
    one.choices, other.choices = [0, 0, 1, 1], [1, 1, 0, 0]
    seen.take(None, 0.0, [one], [other], [{"n": 2}])
    assert seen.changed == 0
    other.choices = [0, 0, 1, 1]
    seen.take(None, 0.0, [one], [other], [{"n": 2}])
    assert seen.changed == 1


def test_an_answer_that_is_not_as_its_schema_says_is_invalid() -> None:
    pytest.importorskip("jsonschema")
    seen = Seen()
    good = answer(text='[{"name":"Anna","age":3,"mood":"sad"}]')
    schema = {**SCHEMA, "minItems": 1}
    bodies = [{"guided_json": schema}, {"guided_json": SCHEMA}]
    seen.take(None, 0.0, [good, good], [good, good], bodies)
    assert (seen.invalid, seen.changed) == (1, 0)


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
    assert slope_per_h([(0.0, 1.0), (0.0, 2.0)]) == 0.0


def test_mechanisms_are_counted_in_logs_also_where_a_process_died_as_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text('{"event":"borrowed"}\n{"event":"borrowed"}\nplain\n{"eve')
    (tmp_path / "scheduler-0.log").write_text('{"event":"move"}\n{"event":"another"}\n[1]\n')
    rows = {str(what): int(str(times)) for what, times in work_table(tmp_path).rows}
    assert sorted(rows.values()) == [0, 0, 1, 2]
    assert rows["blocks borrowed from the other worker"] == 2 and rows["running answers moved"] == 1


def test_where_memory_is_short_one_request_is_longer_than_a_worker() -> None:
    tokens = [len(body["prompt"]) + body["max_tokens"] for body in drawn_bodies(Random(1), LONG_TOKENS)]
    assert tokens[0] > 96 * 16 >= max(tokens[1:]) and sum(tokens) > 96 * 16
    assert all(len(body["prompt"]) <= 300 for body in drawn_bodies(Random(1)))


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("flags", [(), ("--tight",)])
def test_a_short_run_loses_and_changes_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    words = ["--faults", "3", *flags, "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "chaos", *words], cwd=ROOT, check=True, timeout=280)
    figures = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert (figures["faults"], figures["requests"]) == (3, 24)
    assert figures["lost"] == figures["duplicated"] == figures["changed"] == figures["invalid"] == 0
