"""Convert a recording to Chrome trace events for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each instance is a process. A worker's steps are slices, with counters of sequences and free blocks. Requests
are asynchronous pairs, with their queueing and their time at each worker inside. Moves are arrows from source
to target. Times are microseconds since the first event. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

TraceEvent = Mapping[str, Any]
_STEPS, _MOVES = 1, 2
"""Thread ids of a worker."""
_LEAST_US = 1.0


def chrome_trace(events: Sequence[TraceEvent]) -> dict[str, Any]:
    """Return the document. `events` are a recording's, in order: `unix_s`, `instance`, `kind`, fields."""
    moved = [event for event in events if event["kind"] == "moved" and not event["failed"]]
    ends = {str(event[end]) for event in moved for end in ("source", "target")}
    # A killed worker has no events of its own, but the scheduler reports its moves.
    names = sorted({str(event["instance"]) for event in events} | ends)
    pids = {name: number for number, name in enumerate(names, start=1)}
    began_s = events[0]["unix_s"] if events else 0.0
    traced = [*_processes(pids)]
    for event in events:
        at_us = (event["unix_s"] - began_s) * 1e6
        pid = pids[event["instance"]]
        if event["kind"] == "step":
            traced += _step(event, at_us, pid)
        elif event["kind"] == "relief":
            traced.append(_instant(f"relief: {event['chosen']}", at_us, pid, {"worker": event["worker"]}))
        elif event["kind"] == "worker lost":
            traced.append(_instant(f"{event['worker']} lost", at_us, pid, {"sequences": event["sequences"]}))
    traced += _requests(events, began_s, pids)
    traced += _moves(moved, began_s, pids)
    return {"traceEvents": traced, "displayTimeUnit": "ms"}


def _processes(pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for name, pid in pids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        if name.startswith("worker"):
            for thread, called in ((_STEPS, "steps"), (_MOVES, "moves")):
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": called}}


def _step(event: TraceEvent, at_us: float, pid: int) -> Iterator[dict[str, Any]]:
    prefills, decodes = event["prefills"], event["decodes"]
    name = "prefill" if prefills and not decodes else "decode" if not prefills else "prefill and decode"
    args = {name: event[name] for name in ("plan", "epoch", "prefills", "decodes", "prefill_tokens")}
    length_us = max(_LEAST_US, event["step_s"] * 1e6)
    place = {"pid": pid, "tid": _STEPS, "ts": at_us}
    yield {"ph": "X", "name": name, "cat": "step", "dur": length_us, "args": args, **place}
    yield _counter("sequences", at_us, pid, prefills + decodes)
    if "free_blocks" in event:
        yield _counter("free KV blocks", at_us + length_us, pid, event["free_blocks"])


def _requests(
    events: Sequence[TraceEvent], began_s: float, pids: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield begin and end events; unfinished requests end with the recording."""
    last_us = (events[-1]["unix_s"] - began_s) * 1e6 if events else 0.0
    of_request: dict[str, list[TraceEvent]] = {}
    for event in events:
        if event.get("request"):
            of_request.setdefault(event["request"], []).append(event)
    for request_id, own in of_request.items():
        submits = [event for event in own if event["kind"] == "submit"]
        if not submits:
            continue
        pid = pids[submits[0]["instance"]]
        over = next((event for event in own if event["kind"] == "request"), None)
        end_s = began_s + last_us / 1e6 if over is None else over["unix_s"]
        begin_s = submits[0]["unix_s"] if over is None else over["unix_s"] - over["took_s"]
        args = {} if over is None else {"tokens": over["completion_tokens"], "status": over["status"]}
        yield from _pair(request_id, request_id, begin_s - began_s, end_s - began_s, pid, args)
        for name, first_s, until_s in _stays(own, end_s):
            yield from _pair(request_id, name, first_s - began_s, until_s - began_s, pid, {})


def _stays(own: Sequence[TraceEvent], end_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield where each attempt was and when: queued, then at a worker."""
    for submitted in (event for event in own if event["kind"] == "submitted" and not event["known"]):
        mine = (submitted["choice"], submitted["attempt"])
        later = [event for event in own if (event.get("choice"), event.get("attempt")) == mine]
        started = next((event for event in later if event["kind"] == "started"), None)
        over = next((event for event in later if event["kind"] in ("left", "lost")), None)
        until_s = max(submitted["unix_s"], end_s if over is None else over["unix_s"])
        begun_s = until_s if started is None else started["unix_s"]
        yield "queued", submitted["unix_s"], min(begun_s, until_s)
        if started is not None:
            yield f"at {started['worker']}, attempt {mine[1]}", begun_s, max(begun_s, until_s)


def _moves(events: Iterable[TraceEvent], began_s: float, pids: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for number, event in enumerate(events):
        over_us = (event["unix_s"] - began_s) * 1e6
        left_us = max(0.0, over_us - event["switch_s"] * 1e6)
        ends = (("s", event["source"], left_us), ("f", event["target"], over_us))
        for phase, worker, at_us in ends:
            place = {"pid": pids[worker], "tid": _MOVES, "ts": at_us}
            args = {"request": event["request"], "mode": event["mode"], "bytes": event["moved_bytes"]}
            yield {"ph": "X", "name": "move", "cat": "move", "dur": _LEAST_US, "args": args, **place}
            yield {"ph": phase, "name": "move", "cat": "move", "id": number + 1, "bp": "e", **place}


def _pair(
    request_id: str, name: str, begin_s: float, end_s: float, pid: int, args: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    place = {"cat": "request", "id": request_id, "name": name, "pid": pid, "tid": 0}
    yield {"ph": "b", "ts": max(0.0, begin_s * 1e6), "args": args, **place}
    yield {"ph": "e", "ts": max(0.0, end_s * 1e6), **place}


def _counter(name: str, at_us: float, pid: int, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "ts": at_us, "pid": pid, "tid": 0, "args": {"value": value}}


def _instant(name: str, at_us: float, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "name": name, "ts": at_us, "pid": pid, "tid": 0, "s": "p", "args": args}
