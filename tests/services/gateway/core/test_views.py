"""Workers, schedulers and other gateways' requests, as heartbeats and copies show them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.request_copies import RequestShadows, Shadowed, size_bytes
from services.gateway.core.views import SchedulerView, WorkerTable
from shared.messages.reports import SchedulerAnnounced, StepsReport, WorkerReported
from shared.messages.sequence import Sampling, pack_tokens
from shared.messages.shadows import Shadow
from tests.shared.messages.builders import worker_report


def report(worker_id: str, incarnation: int = 1, context: int = 100, model: str = "m") -> WorkerReported:
    return worker_report(worker_id, incarnation=incarnation, model=model, max_context_tokens=context)


def facts(table: WorkerTable) -> tuple[int | None, int]:
    return table.context_tokens("m"), table.serving


def announced(scheduler_id: str, incarnation: int, epoch: int) -> SchedulerAnnounced:
    return SchedulerAnnounced(scheduler_id=scheduler_id, incarnation=incarnation, epoch=epoch, policy="p")


def test_the_context_is_that_of_the_roomiest_worker_and_is_remembered() -> None:
    table = WorkerTable(["m"], timeout_s=2)
    assert facts(table) == (None, 0)
    table.on_report(report("a", context=100), 0)
    table.on_report(report("b", context=300), 0)
    table.on_report(report("c", context=900, model="other"), 0)
    assert facts(table) == (300, 2)
    table.on_report(report("a", context=100), 3)
    assert table.on_tick(3) == [("b", 1), ("c", 1)] and facts(table) == (100, 1)
    assert table.on_tick(6) == [("a", 1)] and facts(table) == (100, 0)


def test_adapters_are_those_of_the_workers_and_are_remembered() -> None:
    table = WorkerTable(["m"], timeout_s=2)
    assert table.adapters("m") is None
    table.on_report(msgspec.structs.replace(report("a"), adapters=("x", "y")), 0)
    table.on_report(msgspec.structs.replace(report("b"), adapters=("x",)), 3)
    assert list(table.adapters("m") or ()) == ["x", "y"]
    assert table.on_tick(3) == [("a", 1)] and list(table.adapters("m") or ()) == ["x"]
    assert table.on_tick(6) == [("b", 1)] and set(table.adapters("m") or ()) == {"x", "y"}
    table.on_report(report("c"), 6)
    assert not table.adapters("m")


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 9), st.floats(0, 3)), max_size=30
    )
)
def test_whatever_is_heard_the_table_is_sound(events: list[tuple[str, int, int, float]]) -> None:
    table = WorkerTable(["m"], timeout_s=2)
    now_s = 0.0
    for worker_id, incarnation, context, after_s in events:
        now_s += after_s
        before = {row["worker"] for row in table.rows(now_s)}
        lost = table.on_tick(now_s)
        assert {worker for worker, _ in lost} <= before
        ended = table.on_report(report(worker_id, incarnation, context), now_s)
        assert ended is None or ended[1] != incarnation
        table.check_integrity()
        assert table.serving >= 1 and table.context_tokens("m") is not None


def test_another_scheduler_is_noticed_and_an_old_one_is_not() -> None:
    view = SchedulerView(timeout_s=2)
    assert not view.is_present(0) and view.on_announced(announced("s0", 1, 5), 0)
    assert not view.on_announced(announced("s0", 1, 5), 1) and view.is_present(2) and not view.is_present(4)
    assert view.on_announced(announced("s0", 2, 6), 4), "restarted"
    assert view.on_announced(announced("s1", 1, 7), 4), "a standby took over"
    assert not view.on_announced(announced("s0", 2, 6), 4), "the one before, woken"
    assert view.scheduler_id == "s1"


def test_an_epoch_is_remembered_for_as_long_as_its_scheduler_is_heard_of() -> None:
    """Keeps one announcement of a huge epoch from shutting the real scheduler out for ever."""
    view = SchedulerView(timeout_s=2)
    view.on_announced(announced("s0", 1, 5), 0)
    view.on_announced(announced("nobody", 1, 2**62), 1)
    assert not view.on_announced(announced("s0", 1, 5), 2) and view.on_announced(announced("s0", 1, 5), 3.5)


def test_why_nobody_serves_the_model_names_what_is_served_instead() -> None:
    table = WorkerTable(["m"], timeout_s=2)
    assert table.absence("m") == "no worker serves 'm'"
    table.on_report(report("w", model="other"), 0)
    assert "w serves 'other'" in table.absence("m") and "same served_name" in table.absence("m")


def test_steps_are_summed_over_starts_and_silences() -> None:
    table = WorkerTable(["m"], timeout_s=2)

    def hear(incarnation: int, tokens: int, counts: tuple[int, ...], at_s: float) -> None:
        steps = StepsReport(tokens=tokens, by_tokens=counts, prefill_s=tokens / 10, by_prefill=counts)
        table.on_report(worker_report("a", incarnation=incarnation, model="m", steps=steps), at_s)

    hear(1, 10, (1,), 0)
    hear(1, 30, (1, 2), 1)
    assert [*table.on_tick(9)] == [("a", 1)]
    hear(1, 35, (2, 2), 10)
    hear(2, 5, (1, 0), 11)
    sums = table.steps["m"]
    assert (sums.tokens, sums.by_tokens[:3], sums.by_prefill[:3]) == (40, [3, 2, 0], [3, 2, 0])
    assert sums.prefill_s == pytest.approx(4.0)


def test_a_worker_given_up_is_gone_until_it_is_heard_again() -> None:
    table = WorkerTable(["m"], timeout_s=2)
    table.on_report(report("a", 5), 0)
    table.on_lost(("a", 4))
    assert facts(table) == (100, 1)
    table.on_lost(("a", 5))
    assert facts(table) == (100, 0) and table.on_tick(9) == []
    assert table.on_report(report("a", 5), 9) is None and table.serving == 1


KEEP_S = 10.0
A, B = ("gateway-0", 1), ("gateway-2", 7)


def shadow(number: int, names: tuple[int, ...] = (), body_bytes: int = 10) -> Shadow:
    request: dict[str, Any] = {"path": "/v1/completions", "body": bytes(body_bytes), "answer_id": "x"}
    prompts = (pack_tokens([1, 2]), pack_tokens([3]))
    samplings = tuple(Sampling(seed=1, max_tokens=4) for _ in prompts)
    request |= {"prompts": prompts, "samplings": samplings, "choices": 2, "heir_key": b"secret"}
    request |= {"created": 0, "key": "k"}
    called = tuple(bytes([name]) for name in names or (number,))
    return Shadow(request_id=f"req_{number}", names=called, fingerprint=b"", **request)


def test_its_sequences_are_called_as_the_gateway_calls_them() -> None:
    assert shadow(1).keys == [("req_1", 0), ("req_1", 1), ("req_1-1", 0), ("req_1-1", 1)]


def test_what_a_gateway_that_is_gone_had_not_completed_is_taken_once() -> None:
    shadows = RequestShadows(1_000_000, KEEP_S)
    for number in range(4):
        shadows.put(A if number < 3 else B, shadow(number), 0.0)
    shadows.end(A, "req_1", 1.0)
    shadows.end(B, "req_0", 1.0)  # not its own to end
    assert [known.shadow.request_id for known in shadows.on_gone(A)] == ["req_0", "req_2"]
    assert shadows.on_gone(A) == [] and shadows.find(b"\x00") is None
    ended = shadows.find(b"\x01")
    assert ended is not None and ended.is_orphan, "complete; computed again when somebody asks"
    assert shadows.find(b"\x03") is not None
    shadows.on_tick(1.0 + KEEP_S + 0.1)
    assert shadows.find(b"\x01") is None and len(shadows) == 1
    shadows.drop(A, "req_3")
    assert len(shadows) == 1, "nor to drop"
    shadows.drop(B, "req_3")
    assert len(shadows) == 0 and shadows.bytes == 0


OWNERS, IDS = st.sampled_from([A, B]), st.integers(0, 9).map("req_{}".format)
NAMES = st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True).map(tuple)
SHADOWS = st.builds(shadow, st.integers(0, 9), NAMES, st.integers(0, 3000))
ACTS = st.one_of(
    st.tuples(st.just("put"), OWNERS, SHADOWS, st.just(0.0)),
    st.tuples(st.just("on_gone"), OWNERS),
    st.tuples(st.just("end"), OWNERS, IDS, st.just(1.0)),
    st.tuples(st.just("drop"), OWNERS, IDS),
    st.tuples(st.just("take"), IDS),
    st.tuples(st.just("on_tick"), st.floats(0, 30)),
)


@given(acts=st.lists(ACTS, max_size=40))
def test_the_tables_agree_and_are_bounded(acts: list[tuple[str, Any]]) -> None:
    shadows = RequestShadows(4 * (1024 + 2000), KEEP_S)
    for name, *said in acts:
        getattr(shadows, name)(*said)
        shadows.check_integrity()


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_the_oldest_give_way(sizes: list[int]) -> None:
    most = 8000
    shadows = RequestShadows(most, KEEP_S)
    kept: list[Shadowed] = []
    for number, size in enumerate(sizes):
        one = shadow(number, body_bytes=size)
        shadows.put(A, one, 0.0)
        kept.append(Shadowed(A, one, 0.0))
        while sum(size_bytes(known.shadow) for known in kept) > most:
            kept.pop(0)
    assert shadows.on_gone(A) == kept
