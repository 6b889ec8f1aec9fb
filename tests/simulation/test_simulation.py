"""The whole system in a simulation: nothing is found, equal seeds run equally, and planted bugs are found.

Each run is a process of its own: in it, what the services import is the simulation's.
"""

import os
import sys
from dataclasses import replace

import pytest

from shared.bus.departures import GRACE_S
from tests.simulation import __main__ as many
from tests.simulation import planted
from tests.simulation.bus import Bus, Server
from tests.simulation.clients import Question
from tests.simulation.run import simulate
from tests.simulation.schedules import Fault, Schedule
from tests.simulation.world import World
from tests.tasks import ran

_SOON, _MANY = 12, 10_000
_SEEDS = range(3)


def simulated(*arguments: str, timeout_s: float, **environment: str) -> str:
    """What it prints; fails the test where it finds something."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = ran(command, cwd=planted.ROOT, env={**os.environ, **environment}, timeout=timeout_s)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_nothing_is_found_in_some_schedules() -> None:
    simulated("--schedules", str(_SOON), "--processes", "2", timeout_s=280)


@pytest.mark.parametrize("seed", [5301, 9762])
def test_what_some_of_10000_schedules_found_is_mended(seed: int) -> None:
    """A model's first report came after placement's tasks had ended. A client left between two writes."""
    assert simulate(Schedule.of(seed)).violation == ""


def test_a_server_without_a_majority_writes_nothing() -> None:
    """It goes on reading what it has, and never writes what it was asked for."""
    bus = Bus(World(1), 3)
    alone, *others = bus.servers
    alone.make_bucket("leases", 1, in_files=True)
    bus.buckets["leases"].leader = alone
    for each in others:
        bus.part(alone, each, 30.0)
    written: list[str] = []

    def write(server: Server) -> None:
        server.consult("leases", lambda at: at.put("leases", server.name, b"", 0), note, is_write=True)

    def note(revision: int | None, error: Exception | None) -> None:
        written.append(repr(error or revision))

    write(alone)
    bus.world.run_until(lambda: False, 12.0)
    assert written == [] and alone.stale == {} and bus.buckets["leases"].leader in others
    write(others[0])
    bus.world.run_until(lambda: False, 30.0)
    assert written == ["1"] and list(bus.buckets["leases"].values) == [others[0].name]
    assert alone.has_majority


def test_equal_seeds_run_equally() -> None:
    """Byte for byte what is said on the bus, and when: in other processes, with other hashes."""
    seeds = ("--schedules", str(len(_SEEDS)), "--processes", "1", "--digests")
    runs = [simulated(*seeds, timeout_s=120, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    digests = [run.splitlines()[: len(_SEEDS)] for run in runs]
    assert digests[0] == digests[1] and len(set(digests[0])) == len(_SEEDS)


def test_a_planted_bug_is_found() -> None:
    """One of them, soon; the others take minutes."""
    found = planted.find("ends-are-never-forgotten", schedules=10, processes=1)
    assert found is not None and "is held and buried" in found.violation


@pytest.mark.parametrize("name", planted.names())
def test_every_bug_can_be_planted(name: str) -> None:
    patch = ["patch", "--strip=1", "--forward", "--dry-run", "--input", str(planted.BUGS / f"{name}.patch")]
    tried = ran(patch, cwd=planted.ROOT)
    assert tried.returncode == 0, tried.stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nothing_is_found_in_many_schedules() -> None:
    simulated("--schedules", str(_MANY), timeout_s=7000)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", planted.names())
def test_every_planted_bug_is_found(name: str) -> None:
    found = planted.find(name, schedules=_MANY, processes=os.cpu_count() or 1)
    assert found is not None, f"no seed of {_MANY} finds {name}"


@pytest.mark.parametrize("gateway", ["gateway-0", "gateway-1"])
def test_an_answer_that_was_taken_over_goes_on_for_those_who_read_it_here(gateway: str) -> None:
    """A gateway was off the bus for long enough that another went on with its answers, and had workers forget
    what they had of them. Back again it waited for 40 s, and told its clients of an internal error."""
    shape = Schedule.of(0).shape
    shape = replace(shape, gateways=2, schedulers=1, workers=2)
    question = Question(1.0, 7, tuple(range(300, 340)), 60, name="lasting")
    verdict = simulate(Schedule(1, shape, (question,), (Fault(1.3, "cut", gateway, 2.6),)))
    assert verdict.violation == "" and verdict.virtual_s < 7.0


def test_a_killed_worker_costs_the_grace_and_a_step_before_its_answers_are_computed_elsewhere() -> None:
    """On virtual time, where nothing but waiting takes any: from the kill until the other worker was told
    to compute all of them. A step there is about 25 ms; the plan for the first one does not wait for it."""
    found = Schedule.of(0).shape
    worker = {**found.settings["worker"], "kv_blocks": 600}
    placement = {"policy": "prefix_aware", "roles": "both"}
    settings = {**found.settings, "worker": worker, "placement": placement}
    settings["scheduler"] = {**found.settings["scheduler"], "policy": "kvasir", "token_budget": 512}
    shape = replace(found, gateways=1, schedulers=1, workers=2, settings=settings)
    questions = tuple(
        Question(1.0 + 0.002 * number, number, tuple(range(300 + 50 * number, 450 + 50 * number)), 200)
        for number in range(8)
    )
    said: list[tuple[float, str]] = []

    def hear(line: str) -> None:
        at_s, _, what = line.strip().partition(" ")
        said.append((float(at_s), what))

    verdict = simulate(Schedule(1, shape, questions, (Fault(1.5, "kill", "worker-0", 1.0),)), hear)
    assert verdict.violation == ""
    lost_s = next(at_s for at_s, what in said if "evt.scheduler.lost" in what)
    assert lost_s - 1.5 < GRACE_S + 0.01
    plans = [at_s for at_s, what in said if at_s > lost_s and "cmd.worker.plan.worker-1" in what]
    assert plans[0] - lost_s < 0.01 and plans[1] - lost_s < 0.08


def test_more_schedules_run_than_one_pool_of_processes_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some 600 the rest was waited for without end: 10,000 could not be run."""
    monkeypatch.setattr(many, "_AT_ONCE", 1)
    monkeypatch.setattr(many, "_MOST_GROUPS", 2)
    assert [verdict.seed for verdict in many._verdicts(first=3, count=5, processes=1)] == [3, 4, 5, 6, 7]
