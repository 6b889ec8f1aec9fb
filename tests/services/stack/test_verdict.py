"""Is it well, what does it do, what is short: three lines, whatever the services say."""

from typing import Any

from services.stack.verdict import troubles, verdict
from shared.messages.reports import ServiceStatus

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
    lines = verdict(CHILDREN, all_say(10, running=64, queued=2), NOW_S)
    assert lines[2] == "short of: turns: 2 sequences queued, though there is KV"
    lines = verdict(CHILDREN, all_say(80, running=64, queued=1), NOW_S)
    assert lines[2] == "short of: turns: 1 sequence queued"


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
