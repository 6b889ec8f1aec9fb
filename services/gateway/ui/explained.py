"""One request's events from all services and its time account: the body of `/ui/requests/{id}`. `python -m
services explain` prints its `sentence` and `causes`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from services.gateway.core.account import UNEXPLAINED, AnswerAccount, Cause, Happened, account_of
from shared.messages.recordings import Recorded

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
    losses = ", ".join(sorted({event.fields["worker"] for event in events if event.kind == "lost"}))
    return {
        Cause.QUEUED: _before(events, others),
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
