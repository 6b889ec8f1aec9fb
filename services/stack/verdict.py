"""A stack in three lines: is it well, what does it do, what is short. From what its services say. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.stack.supervisor import ChildState
from shared import subjects
from shared.messages.reports import ServiceStatus

_FULL, _SPARSE = 0.9, 0.75
"""Of a worker's KV in use: above this it is short of memory; below that it has room."""
_NAMED = 3
_WIDTH = 80


def verdict(children: Sequence[Mapping[str, Any]], answers: Sequence[ServiceStatus]) -> list[str]:
    """Three lines that fit 80 columns. `children` are the supervisor's rows, one an instance."""
    by_service: dict[str, list[ServiceStatus]] = {}
    for answer in answers:
        by_service.setdefault(answer.service, []).append(answer)
    troubles = list(_troubles(children, answers))
    workers = by_service.get("worker", [])
    well = f"yes: all {len(children)} processes ready, {_count(len(workers), 'worker')} answering"
    return [
        _cut("well", "no: " + _named(troubles) if troubles else well),
        _cut("does", _does(by_service)),
        _cut("short of", _named(list(_shortages(by_service))) or "nothing"),
    ]


def _troubles(children: Sequence[Mapping[str, Any]], answers: Sequence[ServiceStatus]) -> Iterator[str]:
    heard = {answer.instance for answer in answers}
    for child in children:
        name, state = str(child["name"]), child["state"]
        if state == ChildState.PARKED:
            continue
        if state != ChildState.READY:
            yield f"{name} is {state}"
        elif name.rpartition("-")[0] in subjects.SERVICES and name not in heard:
            yield f"{name} does not answer"
    for answer in answers:
        if trouble := answer.details.get("trouble"):
            yield f"{answer.instance}: {trouble}"
        still_s = answer.details.get("standstill_s", 0.0)
        if still_s:
            yield f"work waits and nothing has moved for {still_s:.0f} s"


def _does(by_service: Mapping[str, Sequence[ServiceStatus]]) -> str:
    scheduler = _leader(by_service)
    active = sum(each.details.get("active", 0) for each in by_service.get("gateway", ()))
    running, queued = scheduler.get("running", 0), scheduler.get("queued", 0)
    if not active and not running and not queued:
        return "nothing now"
    return f"{_count(active, 'answer')} in progress, {running} running, {queued} queued"


def _shortages(by_service: Mapping[str, Sequence[ServiceStatus]]) -> Iterator[str]:
    """What keeps requests waiting, the most pressing first."""
    scheduler, workers = _leader(by_service), by_service.get("worker", ())
    shares = {each.instance: used_share(each.details) for each in workers}
    full = [name for name, share in shares.items() if share >= _FULL]
    if not workers:
        yield "workers: none answers"
    if full:
        yield f"KV at {', '.join(full[:_NAMED])}{'…' if len(full) > _NAMED else ''}"
    if scheduler.get("queued") and not full and workers:
        room = "" if any(share > _SPARSE for share in shares.values()) else ", though there is KV"
        yield f"turns: {_count(scheduler['queued'], 'sequence')} queued{room}"


def _leader(by_service: Mapping[str, Sequence[ServiceStatus]]) -> Mapping[str, Any]:
    found = [each.details for each in by_service.get("scheduler", ())]
    return next((each for each in found if each.get("role") == "leader"), found[0] if found else {})


def used_share(said: Mapping[str, Any]) -> float:
    """Of a worker's KV, what is in use; cached blocks that may go are not."""
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
