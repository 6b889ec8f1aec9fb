"""`status` over a real bus, with a real predictor to answer.

The roll call over a real bus.
"""

import io
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from services.predictor.config import PredictorConfig
from services.predictor.service import HANDLERS, Predictor, ServedModels
from services.stack.roll_call import RollCall, replies
from services.stack.rundir import DEFAULT_RUN_DIR, RunDirectory
from services.stack.status import _print_rows, _show_summary, process_rows, status
from services.stack.verdict import troubles, verdict
from services.worker.engine.progress import LoadProgress
from services.worker.service import Loading
from shared import subjects
from shared.bus import status_handlers
from shared.config import BusConfig
from shared.errors import BusUnavailable, ConfigError
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus
from tests.conftest import ConnectBus


def live(path: Path, nats_url: str) -> RunDirectory:
    run = RunDirectory(path / "run")
    run.create()
    assert run.acquire()
    children = [
        {"name": name, "pid": 7, "state": "ready", "restarts": 1, "last_exit": "killed by SIGKILL"}
        for name in ("nats", "predictor-0", "worker-0")
    ]
    state = {"phase": "ready", "nats_url": nats_url, "url": "u", "children": children}
    run.write_state({"pid": os.getpid(), **state})
    return RunDirectory(path / "run")


async def shown(run: RunDirectory, *, as_json: bool) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=160)
    code = await status(run, console, as_json=as_json)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


async def test_children_are_listed(tmp_path: Path, bus_config: BusConfig, connect_bus: ConnectBus) -> None:
    run = live(tmp_path, bus_config.url)
    bus = await connect_bus("predictor", "predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, ServedModels(PredictorConfig(model="histogram"))))
    code, text = await shown(run, as_json=False)
    assert code == 0 and "histogram-0" in text and "restarts: 1 (killed by SIGKILL)" in text
    own = [line for line in text.splitlines() if str(tmp_path) not in line]  # how long that is, is not ours
    assert max(map(len, own)) <= 160
    silent = [line.split()[0] for line in text.splitlines() if "no answer on the bus" in line]
    assert silent == ["worker-0"]
    code, text = await shown(run, as_json=True)
    whole: dict[str, Any] = json.loads(text)
    assert code == 0 and [service["instance"] for service in whole["services"]] == ["predictor-0"]
    assert whole["stack"]["children"][2]["name"] == "worker-0"


def test_rows_too_wide_for_the_console_become_columns() -> None:
    rows = [{"instance": f"worker-{n}", "a_long_heading": n, "another_long_heading": n} for n in (0, 1)]
    wide, narrow = (Console(file=io.StringIO(), width=width) for width in (100, 50))
    for console in (wide, narrow):
        _print_rows(console, "worker", rows)
    assert isinstance(wide.file, io.StringIO) and isinstance(narrow.file, io.StringIO)
    across = [line.split() for line in wide.file.getvalue().splitlines()]
    down = [line.split() for line in narrow.file.getvalue().splitlines()]
    assert ["worker-1", "1", "1"] in across and ["another_long_heading", "0", "1"] in down


async def test_a_bus_that_is_away_is_a_problem_not_a_crash(tmp_path: Path, free_port: int) -> None:
    code, text = await shown(live(tmp_path, f"nats://127.0.0.1:{free_port}"), as_json=True)
    assert code == 1 and "no NATS connection" in json.loads(text)["problem"]


def many(workers: int) -> tuple[dict[str, Any], list[ServiceStatus]]:
    """A stack with so many workers, as state and answers."""
    names = ["nats", "seed", "gateway-0", "scheduler-0", "predictor-0", "placement-0", "ledger-0"]
    names += [f"worker-{number}" for number in range(workers)]
    children = [{"name": n, "state": "ready", "restarts": 0, "started_unix_s": time.time()} for n in names]
    busy = {"total_blocks": 100_000, "free_blocks": 7, "evictable_blocks": 40_000, "sequences": 200}
    lending = {"lent_blocks": 12_000, "borrowed_blocks": 900}
    answers = [
        ServiceStatus(
            service=service, instance=name, incarnation=1, uptime_s=1.0, details={**busy, **lending}
        )
        for name in names
        if (service := name.rpartition("-")[0]) in subjects.SERVICES
    ]
    return {
        "phase": "ready",
        "url": "http://127.0.0.1:8080",
        "operator_url": "http://127.0.0.1:9090",
        "model": "m",
        "children": children,
    }, answers


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_the_summary_is_ten_lines_of_80_columns(tmp_path: Path, workers: int) -> None:
    console = Console(file=io.StringIO(), width=80)
    state, answers = many(workers)
    _show_summary(console, state, answers, RunDirectory(DEFAULT_RUN_DIR))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 80
    assert any("200 running, KV 60 %, 12000 lent, 900 borrowed" in line for line in lines)


def test_what_is_odd_comes_first_then_who_decides_then_the_fullest_workers() -> None:
    state, answers = many(8)
    state["children"][9] |= {"state": "starting"}
    full = answers[-1].details | {"evictable_blocks": 0}
    answers[-1] = msgspec.structs.replace(answers[-1], details=full)
    rows = sorted(process_rows(state, answers), key=lambda row: row.urgency)
    assert [row.name for row in rows[:3]] == ["worker-2", "scheduler-0", "worker-7"]
    assert len(rows) == 15 and {row.is_odd for row in rows[1:]} == {False}


async def test_one_that_is_named_says_all_and_a_wrong_name_is_refused(
    tmp_path: Path, bus_config: BusConfig, connect_bus: ConnectBus
) -> None:
    run = live(tmp_path, bus_config.url)
    bus = await connect_bus("predictor", "predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, ServedModels(PredictorConfig(model="histogram"))))
    console = Console(file=io.StringIO(), width=80)
    assert await status(run, console, as_json=False, names=["predictor"]) == 0
    assert isinstance(console.file, io.StringIO) and "model_version" in console.file.getvalue()
    console = Console(file=io.StringIO(), width=80)
    assert await status(run, console, as_json=False, names=["all"]) == 0
    assert isinstance(console.file, io.StringIO)
    assert all(name in console.file.getvalue() for name in ("nats", "predictor-0", "worker-0"))
    with pytest.raises(ConfigError, match="nothing here is called 'worker-7'; there are nats, predictor"):
        await status(run, console, as_json=False, names=["worker-7"])


class Liar:
    """Answers whoever asks for its service in another's name."""

    async def status(self, _: Empty) -> ServiceStatus:
        return ServiceStatus(service="predictor", instance="predictor-0", incarnation=1, uptime_s=0.0)


async def test_only_an_instance_says_how_it_is(bus_config: BusConfig, connect_bus: ConnectBus) -> None:
    """Else one that is taken over could hide that another is dead, from `status` and from who starts it
    again."""
    liar = await connect_bus("predictor", "predictor-1")
    await liar.attach(status_handlers("predictor"), Liar())
    roll = RollCall(bus_config)
    assert await roll.ask("predictor", deadline_s=0.5) == []
    for name in ("predictor-0", "predictor-1"):
        assert await replies(roll, "predictor", (name,), 0.0) is not None
    honest = await connect_bus("predictor", "predictor-0")
    await honest.attach(HANDLERS, Predictor(honest, ServedModels(PredictorConfig(model="constant"))))
    (answer,) = await roll.ask("predictor", deadline_s=0.5, expected=2)
    assert answer.instance == "predictor-0" and answer.incarnation == honest.incarnation
    await roll.close()


async def test_who_answers_is_ready_unless_replaced(bus_config: BusConfig, connect_bus: ConnectBus) -> None:
    roll = RollCall(bus_config)
    probe = partial(replies, roll, "predictor", ("predictor-0",))
    assert await probe(9e9) == "does not answer on the bus yet"
    bus = await connect_bus("predictor", "predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, ServedModels(PredictorConfig(model="constant"))))
    assert await probe(9e9) is None
    assert await replies(roll, "predictor", ("predictor-1",), 9e9) is not None
    assert await probe(0.0) is not None, "answers of an earlier process do not count"
    statuses = await roll.ask_all({"predictor": 1}, deadline_s=0.5)
    assert [status.instance for status in statuses] == ["predictor-0"]
    await roll.close()
    await roll.close()
    with pytest.raises(BusUnavailable):
        await roll.ask("predictor", deadline_s=0.1)


async def test_a_worker_that_loads_says_how_far_it_is(bus_config: BusConfig, connect_bus: ConnectBus) -> None:
    """Instead of "does not answer on the bus yet" for as long as a download takes."""
    roll, progress = RollCall(bus_config), LoadProgress()
    bus = await connect_bus("worker", "worker-0")
    loading = Loading(bus, progress)
    await loading.listen()
    progress.at("reads the weights: 40 %")
    probe = partial(replies, roll, "worker", ("worker-0",))
    assert await probe(9e9) == "reads the weights: 40 %"
    await loading.close()
    assert await probe(9e9) == "does not answer on the bus yet"
    await roll.close()


CHILDREN = [{"name": name, "state": "ready"} for name in ("nats", "gateway-0", "scheduler-0", "worker-0")]

NOW_S = 1_000_000.0


def says(instance: str, **details: Any) -> ServiceStatus:
    service = instance.rpartition("-")[0]
    return ServiceStatus(service=service, instance=instance, incarnation=1, uptime_s=1.0, details=details)


def all_say(used_blocks: int = 1, **scheduler: Any) -> list[ServiceStatus]:
    return [
        says("gateway-0", active=scheduler.get("running", 0)),
        says("scheduler-0", role="leader", **scheduler),
        says("worker-0", total_blocks=100, free_blocks=100 - used_blocks),
    ]


def test_one_that_is_idle_is_well_and_short_of_nothing() -> None:
    assert verdict(CHILDREN, all_say(running=0, queued=0), NOW_S) == [
        "well: yes: all 4 processes ready, 1 worker answering",
        "does: nothing now",
        "short of: nothing",
    ]


def test_a_full_worker_is_what_is_short() -> None:
    lines = verdict(CHILDREN, all_say(95, running=7, queued=3), NOW_S)
    assert lines[1:] == ["does: 7 answers in progress, 7 running, 3 queued", "short of: KV at worker-0"]


def test_who_waits_beside_free_memory_waits_for_a_turn() -> None:
    one, many = "turns: 1 sequence queued", "turns: 40 sequences queued"
    room = f"{one}, though there is KV"
    cases = [(80, 1, 4.0, one), (10, 1, 4.0, room), (10, 1, 0.2, "nothing"), (80, 40, 0.2, many)]
    for share, queued, waited_s, found in cases:
        says = all_say(share, queued=queued, queue=[{"worker": "worker-0", "waited_s": waited_s}])
        assert verdict(CHILDREN, says, NOW_S)[2] == f"short of: {found}"


def test_what_is_not_ready_or_silent_is_named() -> None:
    children = [*CHILDREN, {"name": "worker-1", "state": "starting"}, {"name": "worker-2", "state": "ready"}]
    children.append({"name": "worker-3", "state": "parked"})
    assert verdict(children, all_say(running=0, queued=0), NOW_S)[0] == (
        "well: no: worker-1 is starting; worker-2 does not answer"
    )
    still = all_say(running=1, queued=4, standstill_s=12.0)
    assert verdict(CHILDREN, still, NOW_S)[0] == "well: no: work waits and nothing has moved for 12 s"


def test_nobody_answers() -> None:
    lines = verdict(CHILDREN, [], NOW_S)
    assert lines[0].startswith("well: no: gateway-0 does not answer")
    assert lines[2] == "short of: workers: none answers"
    assert max(map(len, verdict(CHILDREN * 9, [], NOW_S))) <= 80


def test_crashes_of_the_last_minutes_are_no_wellbeing() -> None:
    """Four crashes in ten seconds, and all is ready again: that was "well: yes"."""
    crashed = {"name": "worker-0", "state": "ready", "last_exit": "exit code 1"}
    often = crashed | {"crashed_unix_s": [NOW_S - 400, *(NOW_S - ago_s for ago_s in (10, 7, 5, 3))]}
    answers = all_say(running=0, queued=0)
    assert troubles([*CHILDREN[:3], often], answers, NOW_S) == [
        "worker-0 crashed 4 times in 5 min, the last 3 s ago (exit code 1)"
    ]
    once = crashed | {"crashed_unix_s": [NOW_S - 90]}
    assert troubles([*CHILDREN[:3], once], answers, NOW_S) == ["worker-0 crashed 90 s ago (exit code 1)"]
    assert verdict([*CHILDREN[:3], often], answers, NOW_S + 301)[0].startswith("well: yes")


def test_what_a_service_says_of_itself_counts() -> None:
    """A policy that raises, a tier that was asked for and is missing."""
    answers = [*all_say(running=0, queued=0)[:2], says("worker-0", trouble="its disk tier is missing")]
    assert verdict(CHILDREN, answers, NOW_S)[0] == "well: no: worker-0: its disk tier is missing"


def test_a_worker_much_slower_than_the_others_of_its_model_is_named() -> None:
    def steps(**step_ms: float) -> list[ServiceStatus]:
        names = {name.replace("_", "-"): value for name, value in step_ms.items()}
        return [says(name, model="m", decode_step_ms=value) for name, value in names.items()]

    assert troubles([], steps(worker_0=10.0, worker_1=49.0), 0.0) == []
    assert troubles([], steps(worker_0=10.0, worker_1=51.0), 0.0) == [
        "worker-1 is slow: 51 ms a step, others 10"
    ]
    assert troubles([], steps(worker_0=900.0), 0.0) == []  # nobody to compare it with
    other = says("worker-1", model="another", decode_step_ms=1.0)
    assert troubles([], [*steps(worker_0=900.0), other], 0.0) == []
