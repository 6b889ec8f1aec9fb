"""The supervisor over stand-in children: starts, restarts, gives up, ends. Real processes, real signals.

Waits between restarts.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stack.down import is_alive as alive
from services.stack.probes import serves
from services.stack.process import SeedLauncher
from services.stack.supervisor import Backoff, ChildSpec, ChildState, StartFailed, Supervisor, tail
from tests.patience import PATIENCE_S, until
from tests.services.stack.standin import DEAF, FRONT, PYTHON

ENV = dict(os.environ)


class Stage:
    """A supervisor, what it said, and a clean end."""

    def __init__(
        self, here: Path, specs: Sequence[ChildSpec], backoff: Callable[[], Backoff], logs: Path | None = None
    ) -> None:
        self.said: list[str] = []
        self.supervisor = Supervisor(
            specs,
            cwd=here,
            logs=logs or here,
            say=self.said.append,
            on_change=self._note,
            new_backoff=backoff,
        )
        self.ends: list[str] = []

    def _note(self) -> None:
        for name, child in self.supervisor.children.items():
            if child.state is ChildState.STOPPED and child.process is None and name not in self.ends:
                self.ends.append(name)

    def pid(self, name: str) -> int:
        process = self.supervisor.children[name].process
        assert process is not None, f"{name} does not run"
        return process.pid


@contextlib.asynccontextmanager
async def staged(
    here: Path, *specs: ChildSpec, backoff: Callable[[], Backoff] = Backoff, logs: Path | None = None
) -> AsyncIterator[Stage]:
    stage = Stage(here, specs, backoff, logs)
    stage.supervisor.start()
    try:
        yield stage
    finally:
        await stage.supervisor.stop(0.2)


def folder_of(pid: int) -> Path:
    """In which it runs."""
    return Path(f"/proc/{pid}/cwd").resolve()


def sleeper(name: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(name, ("sleep", "1000"), ENV, stage=stage)


def script(name: str, code: str) -> ChildSpec:
    return ChildSpec(name, (*PYTHON, code), ENV)


async def test_waits_for_readiness_and_leaves_nothing_behind(tmp_path: Path, free_port: int) -> None:
    front = ChildSpec("front", (*PYTHON, FRONT, str(free_port)), ENV, partial(serves, free_port, "/ready"))
    async with staged(tmp_path, sleeper("a"), front) as stage:
        assert stage.supervisor.children["front"].state is not ChildState.READY
        await stage.supervisor.until_ready(10.0)
        pids = [stage.pid("a"), stage.pid("front")]
        assert all(map(alive, pids))
        rows = [child.row() for child in stage.supervisor.children.values()]
        assert [(row["name"], row["pid"], row["state"]) for row in rows] == [
            ("a", pids[0], "ready"),
            ("front", pids[1], "ready"),
        ]
    assert not any(map(alive, pids))


async def test_a_killed_child_is_back_fast_and_becomes_ready_again(tmp_path: Path, free_port: int) -> None:
    front = ChildSpec("front", (*PYTHON, FRONT, str(free_port)), ENV, partial(serves, free_port, "/ready"))
    async with staged(tmp_path, front) as stage:
        await stage.supervisor.until_ready(10.0)
        first = stage.pid("front")
        os.kill(first, signal.SIGKILL)
        child = stage.supervisor.children["front"]
        await until(lambda: child.process is not None and child.process.pid != first)
        await until(lambda: child.state is ChildState.READY)
        assert child.restarts == 1 and child.last_exit == "killed by SIGKILL"
        assert "killed by SIGKILL); starting it again in 0.1 s" in stage.said[0]


async def test_waits_grow_while_a_child_keeps_dying_and_it_says_why_once(tmp_path: Path) -> None:
    def quick() -> Backoff:
        return Backoff(first_s=0.01, longest_s=0.05)

    async with staged(tmp_path, sleeper("a"), backoff=quick) as stage:
        await stage.supervisor.until_ready(10.0)
        child = stage.supervisor.children["a"]
        (tmp_path / "a.log").write_text("the cause\n")
        for deaths in range(1, 8):
            os.kill(stage.pid("a"), signal.SIGKILL)
            await until(lambda deaths=deaths: child.restarts == deaths)  # type: ignore[misc]
            await until(lambda: child.process is not None)
    delays = [line.rsplit("again in ", 1)[1] for line in stage.said if "again in" in line]
    assert delays == ["0.01 s", "0.02 s", "0.04 s", "0.05 s", "0.05 s", "0.05 s", "0.05 s"]
    assert [line for line in stage.said if "keeps ending" in line and "the cause" in line]


async def test_start_is_given_up_when_a_child_dies_again_and_again(tmp_path: Path) -> None:
    async with staged(
        tmp_path, sleeper("a"), script("bad", "print('my reason'); raise SystemExit(1)")
    ) as stage:
        with pytest.raises(StartFailed, match=r"bad ended .*exit code 1.*3 times in a row") as caught:
            await stage.supervisor.until_ready(20.0)
        assert caught.value.children == ("bad",) and stage.supervisor.children["bad"].restarts == 3
        assert "my reason" in tail(stage.supervisor.log_path("bad"))


async def test_wrong_settings_are_not_tried_again(tmp_path: Path) -> None:
    async with staged(tmp_path, script("bad", "raise SystemExit(2)")) as stage:
        with pytest.raises(StartFailed):
            await stage.supervisor.until_ready(20.0)
        assert stage.supervisor.children["bad"].restarts == 1


async def test_a_program_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    async with staged(tmp_path, ChildSpec("bad", ("/nonexistent/program",), ENV)) as stage:
        with pytest.raises(StartFailed, match="No such file"):
            await stage.supervisor.until_ready(20.0)


async def test_start_names_what_is_not_ready_in_time(tmp_path: Path, free_port: int) -> None:
    late = ChildSpec("late", ("sleep", "1000"), ENV, partial(serves, free_port, "/ready"))
    async with staged(tmp_path, sleeper("a"), late) as stage:
        with pytest.raises(StartFailed, match=r"not ready after 2 s: late \(no answer") as caught:
            await stage.supervisor.until_ready(2.0)
        assert caught.value.children == ("late",)


async def test_stages_end_in_order_and_the_deaf_are_killed(tmp_path: Path) -> None:
    deaf = ChildSpec("deaf", (*PYTHON, DEAF + "; print()"), ENV, stage=1)
    async with staged(tmp_path, sleeper("bus"), deaf, sleeper("front", stage=2)) as stage:
        await stage.supervisor.until_ready(10.0)
        await until(lambda: _ignores_sigterm(stage.pid("deaf")))
        pids = [stage.pid(name) for name in ("bus", "deaf", "front")]
        await stage.supervisor.stop(0.2)
        assert not any(map(alive, pids)) and stage.ends == ["front", "deaf", "bus"]
    assert any("deaf did not end within 0.2 s; killing it" in line for line in stage.said)


def _ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text() if sys.platform == "linux" else ""
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn")), 0)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


async def test_nothing_is_restarted_while_stopping(tmp_path: Path) -> None:
    async with staged(tmp_path, sleeper("a"), sleeper("b", stage=1)) as stage:
        await stage.supervisor.until_ready(10.0)
        await stage.supervisor.stop(1.0)
        assert all(c.restarts == 0 and c.process is None for c in stage.supervisor.children.values())


async def test_a_stop_does_not_wait_for_a_launch(tmp_path: Path) -> None:
    waiting = SeedLauncher(tmp_path / "no seed.sock", "late", "json", ())
    async with staged(tmp_path, ChildSpec("late", ("sleep", "1000"), ENV, launch=waiting)) as stage:
        await asyncio.sleep(0.05)
        async with asyncio.timeout(PATIENCE_S):
            await stage.supervisor.stop(2 * PATIENCE_S)
        assert stage.ends == ["late"]


async def test_a_child_is_renewed_from_other_code_at_once_and_that_is_no_failure(tmp_path: Path) -> None:
    code = {name: tmp_path / name for name in ("old", "new")}
    for folder in (*code.values(), tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "what.txt").write_text("")
    async with staged(tmp_path, ChildSpec("a", ("tail", "-f", "what.txt"), ENV)) as stage:
        await stage.supervisor.until_ready(10.0)
        child = stage.supervisor.children["a"]
        for name in ("old", "new", "old"):
            await stage.supervisor.renew("a", code[name], ready_s=10.0, grace_s=5.0)
            assert child.state is ChildState.READY and folder_of(stage.pid("a")) == code[name].resolve()
        assert (child.renewals, child.restarts) == (3, 0)


async def test_a_child_that_does_not_become_ready_runs_from_what_it_had(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad, tmp_path):
        folder.mkdir(exist_ok=True)
    for folder in (good, tmp_path):
        (folder / "there").write_text("")
    code = "import time; open('there'); time.sleep(1000)"
    async with staged(tmp_path, script("a", code)) as stage:
        await stage.supervisor.until_ready(10.0)
        child = stage.supervisor.children["a"]
        await stage.supervisor.renew("a", good, ready_s=10.0, grace_s=1.0)
        with pytest.raises(StartFailed, match="did not become ready from"):
            await stage.supervisor.renew("a", bad, ready_s=10.0, grace_s=1.0)
        assert child.state is ChildState.READY and folder_of(stage.pid("a")) == good.resolve()


async def test_a_deaf_child_is_killed_when_it_is_renewed_and_a_parked_one_is_left(tmp_path: Path) -> None:
    async with staged(tmp_path, ChildSpec("deaf", (*PYTHON, DEAF), ENV), sleeper("a")) as stage:
        await stage.supervisor.until_ready(10.0)
        await until(lambda: _ignores_sigterm(stage.pid("deaf")))
        first = stage.pid("deaf")
        await stage.supervisor.renew("deaf", tmp_path, ready_s=10.0, grace_s=0.2)
        assert stage.pid("deaf") != first and not alive(first)
        stage.supervisor.park("a")
        child = stage.supervisor.children["a"]
        await until(lambda: child.state is ChildState.PARKED)
        await stage.supervisor.renew("a", tmp_path, ready_s=10.0, grace_s=1.0)
        assert child.state is ChildState.PARKED and child.process is None


async def test_a_parked_child_stays_ended_until_it_is_needed(tmp_path: Path) -> None:
    async with staged(tmp_path, sleeper("a"), sleeper("b")) as stage:
        await stage.supervisor.until_ready(10.0)
        first, child = stage.pid("a"), stage.supervisor.children["a"]
        stage.supervisor.park("a")
        stage.supervisor.park("a")
        await until(lambda: child.state is ChildState.PARKED)
        assert not alive(first) and child.restarts == 0
        await asyncio.sleep(0.1)
        assert child.process is None, "it is not restarted"
        stage.supervisor.unpark("a")
        stage.supervisor.unpark("a")
        await until(lambda: child.state is ChildState.READY)
        assert stage.pid("a") != first
        assert [line for line in stage.said if "needed" in line] == [
            "a is not needed; stopping it",
            "a is needed; starting it",
        ]
        stage.supervisor.park("b")
        await until(lambda: stage.supervisor.children["b"].state is ChildState.PARKED)
    assert sorted(stage.ends) == ["a", "b"], "a parked one stops with the rest"


@given(lives=st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_waits_stay_within_bounds_and_never_fall_without_a_stable_life(lives: list[float]) -> None:
    backoff, before = Backoff(), 0.0
    for lived_s in lives:
        delay_s = backoff.on_exit(lived_s)
        assert 0.1 <= delay_s <= 10.0
        assert delay_s >= before or lived_s >= backoff.stable_s
        before = delay_s
