"""A recording becomes trace events that Perfetto takes: pairs end, slices last, arrows have two ends."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.stack.chrome_trace import chrome_trace

KNOWN = {"X": {"dur"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "C": {"args"}, "M": {"args"}, "i": {"s"}}
KNOWN |= {"s": {"id", "cat"}, "f": {"id", "cat", "bp"}}


def check_trace(traced: Sequence[dict[str, Any]]) -> None:
    """By the Trace Event Format's rules: what each phase needs is there, and nothing is left open."""
    balance: Counter[tuple[str, str]] = Counter()
    ends: dict[int, list[str]] = {}
    named = {each["pid"] for each in traced if each["ph"] == "M" and each["name"] == "process_name"}
    for each in traced:
        assert {"ph", "name", "pid", "tid"} | KNOWN[each["ph"]] <= each.keys(), each
        assert each["pid"] in named
        assert each["ph"] == "M" or each["ts"] >= 0
        if each["ph"] == "X":
            assert each["dur"] > 0
        if each["ph"] in "be":
            balance[(each["id"], each["name"])] += 1 if each["ph"] == "b" else -1
        if each["ph"] in "sf":
            ends.setdefault(each["id"], []).append(each["ph"])
    assert not any(balance.values())
    assert all(phases == ["s", "f"] for phases in ends.values())


REF = {"request": "req_1", "choice": 0, "attempt": 1}
STORY: list[dict[str, Any]] = [
    {"instance": "gateway-0", "kind": "submit", **REF},
    {"instance": "scheduler-0", "kind": "submitted", "known": False, **REF},
    {"instance": "scheduler-0", "kind": "started", "worker": "worker-0", **REF},
    {
        "instance": "worker-0",
        "kind": "step",
        "step_s": 0.1,
        "prefills": 1,
        "decodes": 2,
        "prefill_tokens": 8,
        "plan": 1,
        "epoch": 1,
        "free_blocks": 7,
    },
    {
        "instance": "scheduler-0",
        "kind": "moved",
        "source": "worker-0",
        "target": "worker-1",
        "mode": "kv",
        "failed": "",
        "moved_bytes": 9,
        "switch_s": 0.01,
        **REF,
    },
    {"instance": "scheduler-0", "kind": "submitted", "known": False, **REF, "attempt": 2},
    {"instance": "scheduler-0", "kind": "started", "worker": "worker-1", **REF, "attempt": 2},
    {"instance": "worker-1", "kind": "found", **REF, "attempt": 2},
    {"instance": "scheduler-0", "kind": "relief", "worker": "worker-1", "chosen": "swap", "offers": []},
    {"instance": "scheduler-0", "kind": "left", **REF, "attempt": 2},
    {
        "instance": "gateway-0",
        "kind": "request",
        "request": "req_1",
        "took_s": 0.5,
        "completion_tokens": 3,
        "status": 200,
    },
]


def told(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"unix_s": 1000.0 + at / 10, **event} for at, event in enumerate(events)]


def test_a_request_that_moved_is_at_both_workers_with_an_arrow_between() -> None:
    traced = chrome_trace(told(STORY))["traceEvents"]
    check_trace(traced)
    stays = [each["name"] for each in traced if each["ph"] == "b"]
    assert stays == ["req_1", "queued", "at worker-0, attempt 1", "queued", "at worker-1, attempt 2"]
    arrow = [each for each in traced if each["ph"] in "sf"]
    assert arrow[0]["pid"] != arrow[1]["pid"]
    assert [each["args"]["value"] for each in traced if each["ph"] == "C"] == [3, 7]


@given(st.lists(st.sampled_from(range(len(STORY))), max_size=len(STORY), unique=True).map(sorted))
def test_whatever_is_forgotten_the_rest_is_a_trace(kept: list[int]) -> None:
    check_trace(chrome_trace(told([STORY[at] for at in kept]))["traceEvents"])
