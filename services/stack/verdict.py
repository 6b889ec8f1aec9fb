"""Summary of a stack in three lines: health, work, shortages. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

from services.stack.supervisor import ChildState
from shared import subjects
from shared.messages.reports import ServiceStatus

_FULL, _SPARSE = 0.9, 0.75
"""Share of a worker's KV in use: above the first it is full, below the second it has room."""
_RECENT_S = 300.0
"""Time for which a crash is reported."""
_SLOW = 5.0
"""A step this many times as long as those of the other workers is slow."""
_BRIEF_S, _SILENT_S, _ASIDE_S = 1.0, 2.0, 5.0
"""Time in the queue, without an answer, and off the bus or without a leader, after which it is reported."""
ChildRows: TypeAlias = Sequence[Mapping[str, Any]]
Answers: TypeAlias = Sequence[ServiceStatus]
_NAMED = 3
_WIDTH = 80


def verdict(children: ChildRows, answers: Answers, now_unix_s: float, low_disk: str = "") -> list[str]:
    """Return three lines that fit 80 columns. `children` are the supervisor's rows, one per process."""
    by_service = _by_service(answers)
    found = troubles(children, answers, now_unix_s, low_disk)
    workers = by_service.get("worker", [])
    count = sum(len(instances_of(child)) for child in children)
    well = f"yes: all {count} processes ready, {_count(len(workers), 'worker')} answering"
    return [
        _cut("well", "no: " + _named(found) if found else well),
        _cut("does", _does(by_service)),
        _cut("short of", _named(shortages(answers)) or "nothing"),
    ]


def troubles(children: ChildRows, answers: Answers, now_unix_s: float, low_disk: str = "") -> list[str]:
    """Return the stack's faults, most urgent first; empty if it is healthy. `low_disk` is a warning, empty if
    there is none. This is the only place that decides. `status` prints the result; the supervisor sends it to
    the gateways, which show it at /ready, on the live page and in metrics."""
    heard = {answer.instance for answer in answers}
    processes = [trouble for child in children for trouble in _of_process(child, heard)]
    crashes = [trouble for child in children for trouble in _crashes(child, now_unix_s)]
    own = [*_leaderless(children), *filter(None, [low_disk]), *_reported(answers), *_slow(answers)]
    return [*processes, *own, *crashes]


def instances_of(child: Mapping[str, Any]) -> list[str]:
    """Return the names of the instances in that process."""
    return [str(name) for name in child.get("instances") or [child["name"]]]


def _of_process(child: Mapping[str, Any], heard: Collection[str]) -> Iterator[str]:
    state = child["state"]
    if state == ChildState.PARKED:
        return
    account, silent_s = child.get("account", {}), child.get("silent_s", 0.0)
    stuck = account.get("stuck", "")
    if state == ChildState.READY and (silent_s >= _SILENT_S or stuck):
        yield f"{child['name']} hangs: {stuck or f'no answer for {silent_s:.0f} s'}"
        return
    doing, for_s = account.get("parts", {}).get("bus", ("", 0.0))
    if for_s >= _ASIDE_S and doing.startswith("away"):
        yield f"{child['name']} is {doing} for {for_s:.0f} s"
    for name in instances_of(child):
        if state != ChildState.READY:
            yield f"{name} is {state}"
        elif name.rpartition("-")[0] in subjects.SERVICES and name not in heard:
            yield f"{name} does not answer"


def _leaderless(children: ChildRows) -> Iterator[str]:
    """Report if every scheduler waits for the lease."""
    told = [child.get("account", {}).get("parts", {}) for child in children]
    leases = [parts["lease"] for parts in told if "lease" in parts]
    if leases and all(doing.startswith("waits") and for_s >= _ASIDE_S for doing, for_s in leases):
        yield f"no scheduler holds the lease for {min(for_s for _, for_s in leases):.0f} s"


def _crashes(child: Mapping[str, Any], now_unix_s: float) -> Iterator[str]:
    """Report recent crashes. A process that is ready again may have lost answers."""
    recent = [at_s for at_s in child.get("crashed_unix_s", ()) if now_unix_s - at_s < _RECENT_S]
    if recent:
        often = "" if len(recent) == 1 else f" {len(recent)} times in {_RECENT_S / 60:.0f} min, the last"
        ago_s = max(0.0, now_unix_s - recent[-1])
        yield f"{child['name']} crashed{often} {ago_s:.0f} s ago ({child.get('last_exit')})"


def _reported(answers: Sequence[ServiceStatus]) -> Iterator[str]:
    """Report faults from the instances' own status."""
    for answer in answers:
        for name in ("trouble", "unready"):
            if said := answer.details.get(name):
                yield f"{answer.instance}: {said}"
        still_s = answer.details.get("standstill_s", 0.0)
        if still_s:
            yield f"work waits and nothing has moved for {still_s:.0f} s"


def _slow(answers: Sequence[ServiceStatus]) -> Iterator[str]:
    """Report a worker whose steps take much longer than those of the others of its model."""
    steps: dict[str, dict[str, float]] = {}
    for answer in answers:
        if answer.service == "worker" and answer.details.get("decode_step_ms"):
            of_model = steps.setdefault(str(answer.details.get("model")), {})
            of_model[answer.instance] = answer.details["decode_step_ms"]
    for of_model in steps.values():
        for worker, step_ms in of_model.items():
            others = [other_ms for other, other_ms in of_model.items() if other != worker]
            if others and step_ms > _SLOW * median(others):
                yield f"{worker} is slow: {step_ms:.0f} ms a step, others {median(others):.0f}"


def _does(by_service: Mapping[str, Sequence[ServiceStatus]]) -> str:
    scheduler = _leader(by_service)
    active = sum(each.details.get("active", 0) for each in by_service.get("gateway", ()))
    running, queued = scheduler.get("running", 0), scheduler.get("queued", 0)
    if not active and not running and not queued:
        return "nothing now"
    return f"{_count(active, 'answer')} in progress, {running} running, {queued} queued"


def _by_service(answers: Sequence[ServiceStatus]) -> dict[str, list[ServiceStatus]]:
    found: dict[str, list[ServiceStatus]] = {}
    for answer in answers:
        found.setdefault(answer.service, []).append(answer)
    return found


def shortages(answers: Sequence[ServiceStatus]) -> list[str]:
    """Return what delays requests, most urgent first."""
    return list(_shortages(_by_service(answers)))


def _shortages(by_service: Mapping[str, Sequence[ServiceStatus]]) -> Iterator[str]:
    scheduler, workers = _leader(by_service), by_service.get("worker", ())
    shares = {each.instance: used_share(each.details) for each in workers}
    full = [name for name, share in shares.items() if share >= _FULL]
    if not workers:
        yield "workers: none answers"
    if full:
        yield f"KV at {', '.join(full[:_NAMED])}{'…' if len(full) > _NAMED else ''}"
    shown = [row["waited_s"] for row in scheduler.get("queue", ())]
    is_brief = len(shown) == scheduler.get("queued", 0) and max(shown, default=0.0) < _BRIEF_S
    if not is_brief and not full and workers:
        room = "" if any(share > _SPARSE for share in shares.values()) else ", though there is KV"
        yield f"turns: {_count(scheduler['queued'], 'sequence')} queued{room}"


def _leader(by_service: Mapping[str, Sequence[ServiceStatus]]) -> Mapping[str, Any]:
    """Return the leader's details; with several shards, those of all leaders, counts added."""
    found = [each.details for each in by_service.get("scheduler", ())]
    leaders = [each for each in found if each.get("role") == "leader"]
    first = leaders[0] if leaders else found[0] if found else {}
    if len(leaders) < 2:
        return first
    summed = {name: sum(each.get(name, 0) for each in leaders) for name in ("running", "queued")}
    return {**first, **summed, "queue": [row for each in leaders for row in each.get("queue", ())]}


def used_share(said: Mapping[str, Any]) -> float:
    """Return the share of a worker's KV in use, without evictable blocks."""
    total = said.get("total_blocks", 0)
    idle = said.get("free_blocks", 0) + said.get("evictable_blocks", 0)
    return float(max(0, total - idle) / total) if total else 0.0


def _named(items: Sequence[str]) -> str:
    more = f"; and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return "; ".join(items[:_NAMED]) + more


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _cut(head: str, text: str) -> str:
    line = f"{head}: {text}"
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
