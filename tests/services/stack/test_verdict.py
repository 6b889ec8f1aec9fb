"""Is it well, what does it do, what is short: three lines, whatever the services say."""

from typing import Any

from services.stack.verdict import verdict
from shared.messages.reports import ServiceStatus

CHILDREN = [{"name": name, "state": "ready"} for name in ("nats", "gateway-0", "scheduler-0", "worker-0")]


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
    assert verdict(CHILDREN, all_say(running=0, queued=0)) == [
        "well: yes: all 4 processes ready, 1 worker answering",
        "does: nothing now",
        "short of: nothing",
    ]


def test_a_full_worker_is_what_is_short() -> None:
    lines = verdict(CHILDREN, all_say(95, running=7, queued=3))
    assert lines[1:] == ["does: 7 answers in progress, 7 running, 3 queued", "short of: KV at worker-0"]


def test_who_waits_beside_free_memory_waits_for_a_turn() -> None:
    lines = verdict(CHILDREN, all_say(10, running=64, queued=2))
    assert lines[2] == "short of: turns: 2 sequences queued, though there is KV"
    lines = verdict(CHILDREN, all_say(80, running=64, queued=1))
    assert lines[2] == "short of: turns: 1 sequence queued"


def test_what_is_not_ready_or_silent_is_named() -> None:
    children = [*CHILDREN, {"name": "worker-1", "state": "starting"}, {"name": "worker-2", "state": "ready"}]
    children.append({"name": "worker-3", "state": "parked"})
    assert verdict(children, all_say(running=0, queued=0))[0] == (
        "well: no: worker-1 is starting; worker-2 does not answer"
    )
    still = all_say(running=1, queued=4, standstill_s=12.0)
    assert verdict(CHILDREN, still)[0] == "well: no: work waits and nothing has moved for 12 s"


def test_nobody_answers() -> None:
    lines = verdict(CHILDREN, [])
    assert lines[0].startswith("well: no: gateway-0 does not answer")
    assert lines[2] == "short of: workers: none answers"
    assert max(map(len, verdict(CHILDREN * 9, []))) <= 80
