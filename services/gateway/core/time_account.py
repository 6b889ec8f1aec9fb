"""Assigns the wall time of one request to causes. Pure. The input is the flight recorders of all services
(`shared.recorder`). Causes overlap (a plan is in flight while a step runs), so the highest rank wins:
computing before waiting, specific before general. Time without a recorded cause is `unexplained`."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from itertools import pairwise, zip_longest
from typing import Any

from services.gateway.core.stream import OVERLAP_S
from shared.messages.recordings import Recorded


class Cause(StrEnum):
    """A cause of elapsed time. Order is rank: the first of overlapping causes wins."""

    READER = "the client read slowly"
    LENDERS = "waiting for blocks at other workers"
    PREFILL = "computing the prompt"
    DECODE = "computing the answer"
    BLOCKS = "waiting for stored blocks"
    MOVING = "moving to another worker"
    LOST = "its worker was lost"
    FORGOTTEN = "in steps of a worker that is gone"
    PREEMPTED = "preempted: memory for others"
    OTHERS = "other sequences' steps"
    QUEUED = "queued for a worker"
    AT_WORKER = "queued at its worker"
    NO_PLAN = "no plan for it yet"
    PLAN_BUS = "its plan on the bus"
    BETWEEN = "between steps at the worker"
    READ = "reading and tokenizing the request"
    SUBMITTING = "gateway to scheduler"
    TOKENS_BUS = "the last tokens on the bus"
    WRITING = "writing the answer"


RANK = {cause: rank for rank, cause in enumerate(Cause)}
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Happened:
    """An event of some instance, in wall-clock time."""

    at_s: float
    service: str
    instance: str
    kind: str
    fields: dict[str, Any]
    request_id: str = ""

    @property
    def attempt(self) -> int:
        return int(self.fields.get("attempt", 1))


@dataclass(frozen=True, slots=True)
class TimePart:
    """A part of the request's wall time, in Unix seconds."""

    begin_s: float
    end_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a worker that included the request."""

    begin_s: float
    end_s: float
    worker: str
    refs: frozenset[tuple[int, int]]
    is_prefill: bool
    busy_s: float
    """Seconds that the engine had computed before this step."""
    heard_s: float
    plan: tuple[int, int]
    rows: int
    remote_s: float = 0.0
    """Part of the step spent waiting for borrowed blocks."""


@dataclass(slots=True)
class AnswerAccount:
    """The result. `parts` cover `begin_s` to `end_s` without a gap."""

    begin_s: float
    end_s: float
    parts: list[TimePart]
    facts: dict[str, Any]
    is_over: bool

    @property
    def accounted_share(self) -> float:
        """Share of the wall time that has a cause; 1 for an empty time."""
        unexplained_s = self.seconds().get(UNEXPLAINED, 0.0)
        whole_s = self.end_s - self.begin_s
        return 1.0 - unexplained_s / whole_s if whole_s > 0 else 1.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds by cause, longest first."""
        sums: dict[str, float] = defaultdict(float)
        for part in self.parts:
            sums[part.cause] += part.end_s - part.begin_s
        return dict(sorted(sums.items(), key=lambda pair: -pair[1]))


def account_of(events: Sequence[Happened], now_s: float) -> AnswerAccount | None:
    """Return the account of one request's events, in any order; None without a gateway's events. An
    unfinished request is accounted up to `now_s`."""
    events = sorted(events, key=lambda event: event.at_s)
    whole = _last(events, "gateway", "request")
    submits = _of(events, "gateway", "submit")
    if whole is None and not submits:
        return None
    end_s = now_s if whole is None else whole.at_s
    begin_s = submits[0].at_s if whole is None else end_s - whole.fields["took_s"]
    steps = _steps(events)
    claims = [
        *_of_gateway(events, steps, begin_s, end_s),
        *_of_steps(events, steps),
        *_of_queue(events, steps, end_s),
        *_of_handovers(events, steps, end_s),
    ]
    facts = _facts(events, steps, whole)
    return AnswerAccount(begin_s, end_s, sweep(claims, begin_s, end_s), facts, is_over=whole is not None)


TimeClaim = tuple[float, float, Cause]


def sweep(claims: Sequence[TimeClaim], begin_s: float, end_s: float) -> list[TimePart]:
    """Split the time where claims begin or end; each piece gets the highest-ranked claim."""
    ordered = sorted(
        (max(first, begin_s), min(last, end_s), RANK[cause], cause)
        for first, last, cause in claims
        if min(last, end_s) > max(first, begin_s)
    )
    cuts = sorted({begin_s, end_s, *(cut for first, last, _, _ in ordered for cut in (first, last))})
    parts: list[TimePart] = []
    active: list[tuple[int, float, Cause]] = []
    waiting = iter(ordered)
    upcoming = next(waiting, None)
    for first, last in pairwise(cuts):
        while upcoming is not None and upcoming[0] <= first:
            heappush(active, (upcoming[2], upcoming[1], upcoming[3]))
            upcoming = next(waiting, None)
        while active and active[0][1] <= first:
            heappop(active)
        cause = str(active[0][2]) if active else UNEXPLAINED
        if parts and parts[-1].cause == cause:
            parts[-1] = TimePart(parts[-1].begin_s, last, cause)
        else:
            parts.append(TimePart(first, last, cause))
    return parts


# --- claims


def _of_gateway(
    events: Sequence[Happened], steps: Sequence[_Step], begin_s: float, end_s: float
) -> Iterator[TimeClaim]:
    submits = _of(events, "gateway", "submit")
    taken = _of(events, "scheduler", "submitted")
    yield begin_s, submits[0].at_s if submits else end_s, Cause.READ
    for submit in submits:
        arrived = next((each.at_s for each in taken if each.at_s >= submit.at_s - _SLACK_S), submit.at_s)
        yield submit.at_s, arrived, Cause.SUBMITTING
    complete = _last(events, "gateway", "tokens complete")
    if complete is None:
        return
    if steps:
        yield steps[-1].end_s, complete.at_s, Cause.TOKENS_BUS
    yield complete.at_s, end_s, Cause.WRITING
    for blocked in _of(events, "gateway", "reader slow"):
        begun_s = blocked.at_s - blocked.fields["for_s"]
        yield max(begun_s, complete.at_s), blocked.at_s, Cause.READER


def _of_steps(events: Sequence[Happened], steps: Sequence[_Step]) -> Iterator[TimeClaim]:
    plans = {
        (each.fields["worker"], each.fields["epoch"], each.fields["plan"]): each.at_s
        for each in _of(events, "scheduler", "plan")
    }
    for step in steps:
        yield step.end_s - step.remote_s, step.end_s, Cause.LENDERS
        yield step.begin_s, step.end_s, Cause.PREFILL if step.is_prefill else Cause.DECODE
        sent_s = plans.get((step.worker, *step.plan), step.heard_s)
        yield sent_s, step.heard_s, Cause.PLAN_BUS
        yield step.heard_s, step.begin_s, Cause.BETWEEN
    for before, after in pairwise(steps):
        if before.worker != after.worker:
            continue
        own_s = before.end_s - before.begin_s
        others_s = max(0.0, after.busy_s - before.busy_s - own_s)
        yield before.end_s, min(after.begin_s, before.end_s + others_s), Cause.OTHERS
        sent_s = plans.get((after.worker, *after.plan), after.heard_s)
        yield before.end_s, sent_s, Cause.NO_PLAN
    yield from _blocked(events)
    for preempted in _of(events, "scheduler", "preempted"):
        again = next((step.begin_s for step in steps if step.begin_s > preempted.at_s), None)
        if again is not None:
            yield preempted.at_s, again, Cause.PREEMPTED


def _of_queue(events: Sequence[Happened], steps: Sequence[_Step], end_s: float) -> Iterator[TimeClaim]:
    """Claim the time from submission to placement, to the first plan, and to the first step. The first step
    may belong to a later plan if the sequence was deferred."""
    places = _of(events, "scheduler", "placed")
    plans = _of(events, "scheduler", "plan")
    for submitted in _of(events, "scheduler", "submitted"):
        if submitted.fields.get("known"):
            continue
        mine = submitted.attempt
        first = next((each for each in plans if mine in {attempt for _, attempt in _refs(each)}), None)
        placed = next((each for each in places if each.attempt == mine), first)
        yield submitted.at_s, end_s if placed is None else placed.at_s, Cause.QUEUED
        if placed is not None:
            yield placed.at_s, end_s if first is None else first.at_s, Cause.AT_WORKER
        begun = next((step for step in steps if mine in {attempt for _, attempt in step.refs}), None)
        if first is not None and begun is not None:
            yield first.at_s, begun.begin_s, Cause.BETWEEN


def _of_handovers(events: Sequence[Happened], steps: Sequence[_Step], end_s: float) -> Iterator[TimeClaim]:
    """Claim the time between the last record of one attempt and the first step of the next. A lost worker's
    record is missing, but the plans sent to it are known."""
    plans = _of(events, "scheduler", "plan")
    complete = _last(events, "gateway", "tokens complete")
    over_s = end_s if complete is None else complete.at_s
    for (choice, attempt), following, fresh in _handovers(events):
        ended = [step.end_s for step in steps if (choice, attempt) in step.refs]
        sent = [each.at_s for each in plans if (choice, attempt) in _refs(each)]
        if following is None:
            if sent and not ended:
                yield sent[0], over_s, Cause.FORGOTTEN
            continue
        if sent and not ended:
            yield sent[0], sent[-1], Cause.FORGOTTEN
        first_s = max((each for each in ended or sent if each <= following.at_s), default=following.at_s)
        if "moved" in fresh:
            after = [step.begin_s for step in steps if (choice, following.attempt) in step.refs]
            yield first_s, min(after, default=end_s), Cause.MOVING
        else:
            yield first_s, following.at_s, Cause.LOST


def _handovers(events: Sequence[Happened]) -> Iterator[tuple[tuple[int, int], Happened | None, list[str]]]:
    """Yield each choice's attempts in order: choice and attempt, the next submission, its causes. The next
    submission is None for the last attempt. A resubmission of the same attempt does not count."""
    by_choice: dict[int, dict[int, Happened]] = defaultdict(dict)
    for submit in _of(events, "gateway", "submit"):
        by_choice[int(submit.fields.get("choice", 0))].setdefault(submit.attempt, submit)
    for choice, attempts in by_choice.items():
        submits = list(attempts.values())
        for submit, following in zip_longest(submits, submits[1:]):
            before = submit.fields.get("causes", {})
            told = {} if following is None else following.fields.get("causes", {})
            fresh = [cause for cause, count in told.items() if count > before.get(cause, 0)]
            yield (choice, submit.attempt), following, fresh


def _refs(batch: Happened) -> set[tuple[int, int]]:
    return {(choice, attempt) for choice, attempt, *_ in (*batch.fields["chunks"], *batch.fields["own"])}


# --- reading events

_SLACK_S = 0.002
"""Tolerated difference between the clocks of two services on one machine."""


def _of(events: Sequence[Happened], service: str, kind: str) -> list[Happened]:
    return [event for event in events if event.kind == kind and event.service == service]


def _last(events: Sequence[Happened], service: str, kind: str) -> Happened | None:
    return next(reversed(_of(events, service, kind)), None)


def _steps(events: Sequence[Happened]) -> list[_Step]:
    """Return the steps that were still awaited when they ended. A step that a frozen worker ends after the
    request moved on computed nothing for it."""
    given_up, found = {}, []
    for ref, following, fresh in _handovers(events):
        if following is not None:
            given_up[ref] = following.at_s + ("moved" in fresh) * OVERLAP_S
    for event in _of(events, "worker", "step"):
        said = event.fields
        end_s = event.at_s + said["step_s"]
        if all(end_s > given_up.get(ref, end_s) for ref in _refs(event)):
            continue
        found.append(
            _Step(
                begin_s=event.at_s,
                end_s=end_s,
                worker=event.instance,
                refs=frozenset(_refs(event)),
                is_prefill=bool(said["chunks"]),
                busy_s=said["busy_s"],
                heard_s=min(said["heard_at_s"], event.at_s),
                plan=(said["epoch"], said["plan"]),
                rows=said["prefills"] + said["decodes"],
                remote_s=said.get("remote_s", 0.0),
            )
        )
    return found


def _blocked(events: Sequence[Happened]) -> Iterator[TimeClaim]:
    open_s: float | None = None
    for event in events:
        if event.service == "worker" and event.kind == "waits for blocks" and open_s is None:
            open_s = event.at_s
        elif event.service == "worker" and event.kind == "has blocks" and open_s is not None:
            yield open_s, event.at_s, Cause.BLOCKS
            open_s = None


def _facts(events: Sequence[Happened], steps: Sequence[_Step], whole: Happened | None) -> dict[str, Any]:
    submitted = next(iter(_of(events, "scheduler", "submitted")), None)
    predicted = next(iter(_of(events, "scheduler", "predicted")), None)
    complete = _last(events, "gateway", "tokens complete")
    found = _of(events, "worker", "found")
    left = _last(events, "scheduler", "left")
    facts: dict[str, Any] = {
        "prompt_tokens": None if submitted is None else submitted.fields["prompt_tokens"],
        "most_tokens": None if submitted is None else submitted.fields["max_tokens"],
        "predicted_tokens": None if predicted is None else predicted.fields["tokens"],
        "tokens": None if complete is None else complete.fields["tokens"],
        "steps": len(steps),
        "rows": round(sum(step.rows for step in steps) / len(steps), 1) if steps else 0,
        "most_rows": max((step.rows for step in steps), default=0),
        "remote_steps": sum(step.remote_s > 0 for step in steps),
        "rows_at_first": steps[0].rows if steps else 0,
        "workers": list(dict.fromkeys(step.worker for step in steps)),
        "found_blocks": {
            tier: sum(event.fields[f"{tier}_blocks"] for event in found)
            for tier in ("device", "host", "disk")
        },
        "found_tokens": found[0].fields["tokens"] if found else 0,
        "expected_tokens": None if left is None else left.fields.get("expected_tokens"),
        "preemptions": len(_of(events, "scheduler", "preempted")),
        "moves": len([each for each in _of(events, "scheduler", "moved") if not each.fields["failed"]]),
        "attempts": max((event.attempt for event in _of(events, "gateway", "submit")), default=1),
    }
    if whole is not None:
        facts |= {"status": whole.fields["status"], "client_gone": whole.fields["client_gone"]}
    return facts


_NAMED = 3


def explained(
    request_id: str, told: Sequence[Recorded], others: Sequence[Recorded], now_s: float
) -> dict[str, Any]:
    """Return the request's events in wall-clock order, and its account if known. `others` are all placements
    and requests, to find those ahead in the queue."""
    events = sorted(happened(told), key=lambda event: event.at_s)
    account = account_of(events, now_s)
    shown = [
        {"unix_s": event.at_s, "instance": event.instance, "kind": event.kind, **event.fields}
        for event in events
    ]
    answer: dict[str, Any] = {"request": request_id, "events": shown}
    if account is not None:
        answer["account"] = _written(account, events, happened(others))
    return answer


def happened(told: Sequence[Recorded]) -> list[Happened]:
    """Return the events in wall-clock time, by each instance's offset."""
    found = []
    for each in told:
        ahead_s = each.unix_s - each.now_s
        for event in each.events:
            fields = dict(event.fields)
            if "heard_s" in fields:
                fields["heard_at_s"] = fields["heard_s"] + ahead_s
            found.append(
                Happened(
                    event.at_s + ahead_s, each.service, each.instance, event.kind, fields, event.request_id
                )
            )
    return found


def _written(
    account: AnswerAccount, events: Sequence[Happened], others: Sequence[Happened]
) -> dict[str, Any]:
    whole_s = account.end_s - account.begin_s
    notes = _notes(account, events, others)
    causes = [
        {
            "cause": cause,
            "seconds": spent_s,
            "share": spent_s / whole_s if whole_s else 0.0,
            "note": notes.get(cause, ""),
        }
        for cause, spent_s in account.seconds().items()
    ]
    return {
        "begin_s": account.begin_s,
        "end_s": account.end_s,
        "is_over": account.is_over,
        "accounted": account.accounted_share,
        "sentence": _sentence(account, causes),
        "causes": causes,
        "parts": [{"begin_s": p.begin_s, "end_s": p.end_s, "cause": p.cause} for p in account.parts],
        "facts": account.facts,
    }


def _sentence(account: AnswerAccount, causes: Sequence[dict[str, Any]]) -> str:
    facts, whole_s = account.facts, account.end_s - account.begin_s
    first = causes[0]["cause"] if causes else UNEXPLAINED
    length = f"{facts['tokens']} tokens" if facts["tokens"] is not None else "not complete yet"
    if facts["predicted_tokens"] is not None:
        length += f" (predicted {facts['predicted_tokens']})"
    share = causes[0]["share"] if causes else 0.0
    expected = "" if facts["expected_tokens"] is None else f" ({facts['expected_tokens']} expected)"
    return (
        f"{whole_s:.3f} s, most of it ({share:.0%}) {first}; {facts['prompt_tokens']} prompt tokens, "
        f"{facts['found_tokens']} of them found{expected}, {length} in {facts['steps']} steps; "
        f"{account.accounted_share:.1%} of the time has a cause"
    )


def _notes(account: AnswerAccount, events: Sequence[Happened], others: Sequence[Happened]) -> dict[str, str]:
    facts = account.facts
    found = ", ".join(f"{count} on {tier}" for tier, count in facts["found_blocks"].items() if count)
    shared = f"{facts['rows']} sequences a step on average, {facts['most_rows']} at the most"
    moved = [event.fields for event in events if event.kind == "moved"]
    why = "".join(
        {f"; {one.fields['why']}" for one in _of(events, "scheduler", "placed") if "why" in one.fields}
    )
    losses = ", ".join(sorted({event.fields["worker"] for event in events if event.kind == "lost"}))
    return {
        Cause.QUEUED: _before(events, others) + why,
        Cause.AT_WORKER: f"{facts['rows_at_first']} sequences in its first step",
        Cause.DECODE: shared + (f", at {', '.join(facts['workers'])}" if facts["workers"] else ""),
        Cause.LENDERS: f"in {facts['remote_steps']} of {facts['steps']} steps: a slow link, or a busy lender",
        Cause.PREFILL: f"blocks found: {found or 'none'}",
        Cause.BLOCKS: f"blocks found: {found or 'none'}",
        Cause.PREEMPTED: "once" if facts["preemptions"] == 1 else f"{facts['preemptions']} times",
        Cause.MOVING: "; ".join(f"{each['source']} to {each['target']}, {each['mode']}" for each in moved),
        Cause.LOST: losses or "or fell silent",
        UNEXPLAINED: "nobody recorded what happened then, or has forgotten it",
    }


def _before(events: Sequence[Happened], others: Sequence[Happened]) -> str:
    """Return which requests got a worker while this one waited, and their keys."""
    submitted = next((e for e in events if e.service == "scheduler" and e.kind == "submitted"), None)
    if submitted is None:
        return ""
    began = (event.at_s for event in events if event.kind in ("placed", "started"))
    until_s = next((at_s for at_s in began if at_s >= submitted.at_s), None)
    ahead = {
        event.request_id: event
        for event in others
        if event.kind in ("placed", "started")
        and event.request_id != submitted.request_id
        and event.at_s >= submitted.at_s
        and (until_s is None or event.at_s < until_s)
    }
    keys = {event.request_id: event.fields.get("key", "") for event in others if event.kind == "request"}
    owners = Counter(key for request_id in ahead if (key := keys.get(request_id)))
    if not ahead:
        return f"{submitted.fields['queued']} in the queue as it came; nobody got a worker before it"
    named = ", ".join(list(ahead)[:_NAMED]) + ("…" if len(ahead) > _NAMED else "")
    whose = ", ".join(f"{count} of key {key}" for key, count in owners.most_common(2))
    return f"behind {len(ahead)}: {named}" + (f" ({whose})" if whose else "")
