"""A term on a real nats-server: submissions, ends, cancels, silent workers."""

import asyncio
import logging

import msgspec
import pytest

from services.scheduler.core import long_waits
from services.scheduler.core.worker_pipeline import WorkerPipeline
from services.scheduler.leader_term import _say_lost
from shared import metrics, subjects
from shared.errors import ContextOverflow, ForeignSequence, Overloaded
from shared.log import fields_of
from shared.messages.base import Empty
from shared.messages.commands import SubmitReply, SubmitSequence
from shared.messages.reports import WorkerLost
from shared.messages.sequence import SequenceRef
from tests.patience import PATIENCE_S, until
from tests.services.scheduler.bus_stack import BusStack
from tests.shared.messages.builders import cancelling, ref
from tests.tasks import running


async def test_a_submission_is_placed_planned_and_ends(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        first = await stack.reader.submit(stack.reader.spec("a"))
        again = await stack.reader.submit(stack.reader.spec("a"))
        assert (first.known, again.known) == (False, True)
        assert first.incarnation == stack.reader.announced[-1].incarnation
        await until(lambda: "a" in stack.reader.ended)
        assert stack.reader.ended == {"a": 1}
        assert {asked.max_tokens for asked in stack.predictor.asked} == {40}
        assert {plan.epoch for plan in worker.plans} == {first.epoch}
        assert worker.plans[0].starts[0].ref.request_id == "a"


async def test_many_submissions_at_once_all_end(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        names = [f"r{number}" for number in range(40)]
        await asyncio.gather(*(stack.reader.submit(stack.reader.spec(name)) for name in names))
        await until(lambda: set(stack.reader.ended) == set(names))
        assert set(stack.reader.ended.values()) == {1}


async def test_a_cancel_reaches_the_worker(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        spec = stack.reader.spec("a", prompt_tokens=8, answer_tokens=200, max_tokens=200)
        await stack.reader.submit(spec)
        await until(lambda: worker.process.used_blocks > 4)
        await stack.reader.bus.publish(subjects.scheduler_cancel("gateway-0"), cancelling(spec.ref))
        await until(lambda: worker.process.used_blocks == 0, within_s=1.0)
        assert (await stack.reader.submit(spec)).known, "a late submission of it"


async def test_another_gateway_neither_ends_a_sequence_nor_submits_under_its_name(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        mine = stack.reader.spec("a", prompt_tokens=8, answer_tokens=200, max_tokens=200)
        await stack.reader.submit(mine)
        await until(lambda: worker.process.used_blocks > 4)
        other = stack.peers
        for attempt in (1, 2):
            named = ref("a", attempt)
            await other.publish(subjects.scheduler_cancel("gateway-1"), cancelling(named, "gateway-1"))
            theirs = msgspec.structs.replace(mine, ref=named, gateway_id="gateway-1")
            with pytest.raises(ForeignSequence, match="under another name"):
                await other.request(
                    subjects.scheduler_submit("gateway-1"),
                    SubmitSequence(spec=theirs),
                    SubmitReply,
                    deadline_s=PATIENCE_S,
                )
            await other.publish(subjects.scheduler_cancel("gateway-1"), cancelling(named))
        assert (await stack.reader.submit(mine)).known
        assert worker.process.used_blocks > 4
        await until(lambda: stack.reader.ended == {"a": 1})


async def test_refusals_keep_their_type_on_the_way(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("a"))
        await until(lambda: "a" in stack.reader.ended)
        with pytest.raises(ContextOverflow, match="This model's maximum context length is 256 tokens"):
            await stack.reader.submit(stack.reader.spec("b", prompt_tokens=250))


async def test_a_refusal_says_what_taking_it_would_have_cost(
    stack: BusStack, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = await stack.scheduler(max_queued=2)
    with caplog.at_level(logging.INFO):
        async with running(scheduler.serve()):
            await until(lambda: bool(stack.reader.announced))
            for name in "ab":
                await stack.reader.submit(stack.reader.spec(name))
            with pytest.raises(Overloaded) as refused:
                await stack.reader.submit(stack.reader.spec("c"))
    assert (refused.value.retry_after_s or 0.0) >= 1.0
    (line,) = (record for record in caplog.records if record.getMessage() == "refused")
    fields = fields_of(line)
    assert fields["error"] == "overloaded" and fields["ref"].startswith("c")
    assert fields["costs_s"]["first"] > 0


async def test_a_worker_that_falls_silent_is_announced_as_lost(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(scheduler.serve()):
        async with running(worker.run()):
            await until(lambda: bool(stack.reader.announced))
            spec = stack.reader.spec("a", answer_tokens=200, max_tokens=200)
            await stack.reader.submit(spec)
            await until(lambda: worker.process.used_blocks > 4)
        await until(lambda: bool(stack.reader.lost))
        assert stack.reader.lost[0].worker_id == "worker-0"
        assert stack.reader.lost[0].refs == (spec.ref,)
        again = await stack.worker("worker-1")
        stack.placement.worker_id = "worker-1"
        async with running(again.run()):
            await stack.reader.submit(stack.reader.spec("a", answer_tokens=20, attempt=2))
            await until(lambda: "a" in stack.reader.ended)


async def test_status_tells_what_was_planned(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("a", prompt_tokens=9))
        await until(lambda: "a" in stack.reader.ended)
        details = (await stack.statuses())["scheduler-0"]
        assert (details["role"], details["starts"], details["prefill_tokens"]) == ("leader", 1, 9)
        assert details["steps"] >= 12 and details["plans"] == len(worker.plans)
        assert details["workers"][0]["worker"] == "worker-0"


async def test_work_that_waits_where_nothing_moves_shows_in_log_status_and_metrics(
    stack: BusStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stack that had stopped for minutes looked like one that was idle."""
    monkeypatch.setattr(long_waits, "STANDSTILL_S", 0.4)
    monkeypatch.setattr(long_waits, "_LOOK_S", 0.1)
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        assert (await scheduler.status(Empty())).details["standstill_s"] == 0
        monkeypatch.setattr(WorkerPipeline, "next_plans", lambda self, now_s: [])
        await stack.reader.submit(stack.reader.spec("a"))
        await until(lambda: "work waits and nothing moves: 1 sequences at worker-0" in caplog.text)
        assert (await scheduler.status(Empty())).details["standstill_s"] >= 0.4
        shown = metrics.gauge("kvasir_scheduler_standstill_seconds", "")
        await until(lambda: shown._value.get() >= 0.4)
        monkeypatch.undo()
        await until(lambda: "a" in stack.reader.ended and shown._value.get() == 0)


LOST_REF = ref("r")


@pytest.mark.parametrize(("refs", "level"), [((), logging.INFO), ((LOST_REF,), logging.WARNING)])
def test_only_a_lost_worker_that_is_missed_is_warned_of(
    refs: tuple[SequenceRef, ...], level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is parked by plan had nothing to do."""
    with caplog.at_level(logging.INFO, "kvasir"):
        _say_lost(WorkerLost(worker_id="worker-3", incarnation=1, refs=refs))
    (record,) = caplog.records
    assert record.levelno == level
    assert ("lost" in record.getMessage()) == bool(refs)
