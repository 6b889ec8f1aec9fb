"""Workers and schedulers as their heartbeats show them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.peers import SchedulerView, WorkerTable
from shared.messages.reports import SchedulerAnnounced, StepsReport, WorkerReported
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
    assert table.on_tick(3) == [("b", 1), ("c", 1)]
    assert facts(table) == (100, 1)
    assert table.on_tick(6) == [("a", 1)]
    assert facts(table) == (100, 0)


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
        assert table.serving >= 1
        assert table.context_tokens("m") is not None


def test_another_scheduler_is_noticed_and_an_old_one_is_not() -> None:
    view = SchedulerView(timeout_s=2)
    assert not view.is_present(0)
    assert view.on_announced(announced("s0", 1, 5), 0)
    assert not view.on_announced(announced("s0", 1, 5), 1)
    assert view.is_present(2) and not view.is_present(4)
    assert view.on_announced(announced("s0", 2, 6), 4), "restarted"
    assert view.on_announced(announced("s1", 1, 7), 4), "a standby took over"
    assert not view.on_announced(announced("s0", 2, 6), 4), "the one before, woken"
    assert view.scheduler_id == "s1"


def test_an_epoch_is_remembered_for_as_long_as_its_scheduler_is_heard_of() -> None:
    """Keeps one announcement of a huge epoch from shutting the real scheduler out for ever."""
    view = SchedulerView(timeout_s=2)
    view.on_announced(announced("s0", 1, 5), 0)
    view.on_announced(announced("nobody", 1, 2**62), 1)
    assert not view.on_announced(announced("s0", 1, 5), 2)
    assert view.on_announced(announced("s0", 1, 5), 3.5)


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
    assert facts(table) == (100, 0)
    assert table.on_tick(9) == []
    assert table.on_report(report("a", 5), 9) is None
    assert table.serving == 1
