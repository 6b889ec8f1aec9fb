"""Leadership and terms on a real nats-server: restarts adopt; submissions, cancels, lost workers."""

import asyncio
import logging
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.scheduler import leader_term
from services.scheduler.cells import MOST_MODELS, Cell, Cells
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import long_waits
from services.scheduler.core.effects import PublishWorkerLost
from services.scheduler.core.worker_pipeline import WorkerPipeline
from services.scheduler.reporting import TermReport
from services.scheduler.service import run
from shared import metrics, subjects
from shared.bus.departures import BusAdvisory, BusClient, connection_name
from shared.clock import monotonic_s
from shared.config import BusConfig
from shared.errors import ConfigError, ContextOverflow, ForeignSequence, Overloaded, UnavailableError
from shared.log import fields_of
from shared.messages.base import Empty
from shared.messages.commands import SubmitReply, SubmitSequence
from shared.messages.reports import WorkerLost
from shared.messages.sequence import SequenceRef
from shared.recorder import Recorder
from tests.patience import PATIENCE_S, until
from tests.services.scheduler.bus_peers import PlacementOnBus, PredictorOnBus
from tests.services.scheduler.bus_stack import QUICK, BusStack
from tests.shared.messages.builders import cancelling, ref
from tests.tasks import running


async def test_a_standby_takes_over_and_adopts(stack: BusStack) -> None:
    worker = await stack.worker()
    first, second = await stack.scheduler("scheduler-0"), await stack.scheduler("scheduler-1")
    async with running(worker.run()), running(first.serve()) as leading:
        await until(lambda: bool(stack.reader.announced))
        async with running(second.serve()):
            await asyncio.sleep(0.3)
            statuses = await stack.statuses()
            assert {name: details["role"] for name, details in statuses.items()} == {
                "scheduler-0": "leader",
                "scheduler-1": "standby",
            }
            await stack.reader.submit(stack.reader.spec("a", answer_tokens=150, max_tokens=200))
            await until(lambda: worker.process.used_blocks > 4)
            prefilled = sum(tokens for tokens, _ in worker.process.step_tokens)
            epoch = stack.reader.announced[-1].epoch
            leading[0].cancel()
            await until(lambda: stack.reader.announced[-1].scheduler_id == "scheduler-1")
            await until(lambda: "a" in stack.reader.ended)
            assert stack.reader.announced[-1].epoch > epoch
            assert sum(tokens for tokens, _ in worker.process.step_tokens) == prefilled
            assert (await stack.reader.submit(stack.reader.spec("a"))).known


async def test_a_higher_epoch_makes_it_stand_for_the_lease_again(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("b"))
        await until(lambda: "b" in stack.reader.ended)  # so it has adopted the worker
        incarnation = stack.reader.announced[-1].incarnation
        later = worker.process.says["epoch"] = stack.reader.announced[-1].epoch + 10**9
        await until(lambda: stack.reader.announced[-1].epoch == later + 1)
        assert stack.reader.announced[-1].incarnation != incarnation
        await stack.reader.submit(stack.reader.spec("a"))
        await until(lambda: "a" in stack.reader.ended)


async def test_a_worker_that_leaves_the_bus_is_lost_without_waiting_for_its_silence(stack: BusStack) -> None:
    """What nats-server says of it is in `tests/shared/bus/test_departures.py`."""
    worker, scheduler = await stack.worker(), await stack.scheduler(worker_timeout_s=3600.0)
    start = (worker.bus.instance, worker.bus.incarnation)
    async with running(scheduler.serve()):
        async with running(worker.run()):
            await until(lambda: bool(stack.reader.announced))
            await stack.reader.submit(stack.reader.spec("a", answer_tokens=150, max_tokens=200))
            await until(lambda: worker.process.used_blocks > 4)
        for other in ((start[0], start[1] + 1), ("worker-9", start[1]), start):
            client = BusClient(other[0], connection_name(*other))
            scheduler._bus.departures.on_disconnected(BusAdvisory(client))
        await until(lambda: bool(stack.reader.lost))
        assert [(lost.worker_id, lost.incarnation) for lost in stack.reader.lost] == [start]
        assert [ref.request_id for ref in stack.reader.lost[0].refs] == ["a"] and stack.reader.lost[0].is_dead


async def test_a_pause_of_its_own_costs_no_worker(stack: BusStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped for half a minute loses nobody, whether a tick comes first then or a heartbeat."""
    stopped_s = 0.0
    monkeypatch.setattr(leader_term, "monotonic_s", lambda: monotonic_s() + stopped_s)
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("a", answer_tokens=150, max_tokens=200))
        await until(lambda: worker.process.used_blocks > 4)
        stopped_s = 30.0
        await until(lambda: "a" in stack.reader.ended)
        assert stack.reader.lost == []


async def test_an_unknown_policy_stops_it_before_it_connects(bus_config: BusConfig) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        await run(SchedulerConfig(policy="vlm", bus=bus_config))


async def test_the_process_survives_its_kill_and_stops_on_signal(
    stack: BusStack, bus_config: BusConfig
) -> None:
    worker = await stack.worker()
    flags = [word for name, value in QUICK.items() for word in (f"--{name}", str(value))]
    command = (sys.executable, "-m", "services.scheduler", "--bus.url", bus_config.url, *flags)
    async with running(worker.run()):
        process = await asyncio.create_subprocess_exec(*command)
        try:
            await until(lambda: bool(stack.reader.announced))
            await stack.reader.submit(stack.reader.spec("a", answer_tokens=150, max_tokens=200))
            await until(lambda: worker.process.used_blocks > 4)
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            process = await asyncio.create_subprocess_exec(*command)
            await until(lambda: "a" in stack.reader.ended)
            assert stack.reader.ended == {"a": 1}
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 8.0) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_without_predictor_and_placement_nothing_is_lost(stack: BusStack) -> None:
    await stack.peers.detach(PlacementOnBus.HANDLERS)
    await stack.peers.detach(PredictorOnBus.HANDLERS)
    await check_spread(stack)


async def test_a_placement_that_hangs_is_not_waited_for(stack: BusStack) -> None:
    """Every request waited for as long as it hung."""
    stack.placement.delay_s = 1000.0
    await check_spread(stack)


async def check_spread(stack: BusStack) -> None:
    """Requests go to the least loaded worker, and the recording says that placement did not answer."""
    unplaced = metrics.counter("kvasir_scheduler_placed_without_total", "")
    before = unplaced._value.get()
    workers = [await stack.worker(name) for name in ("worker-0", "worker-1")]
    scheduler = await stack.scheduler()
    async with running(*(worker.run() for worker in workers), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        names = ["a", "b", "c", "d"]
        specs = [stack.reader.spec(name, answer_tokens=90, max_tokens=100) for name in names]
        await asyncio.gather(*map(stack.reader.submit, specs))
        await until(lambda: set(stack.reader.ended) == set(names))
        assert all(worker.plans for worker in workers)
        assert unplaced._value.get() - before == len(names)


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
        assert (await stack.reader.submit(mine)).known and worker.process.used_blocks > 4
        await until(lambda: stack.reader.ended == {"a": 1})


async def test_refusals_keep_their_type_on_the_way(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("a"))
        await until(lambda: "a" in stack.reader.ended)
        with pytest.raises(ContextOverflow, match="This model's maximum context length is 256 tokens"):
            await stack.reader.submit(stack.reader.spec("b", prompt_tokens=250))


async def test_a_refusal_says_what_it_saved(stack: BusStack, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = await stack.scheduler(max_queued=2)
    with caplog.at_level(logging.DEBUG):
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
        assert stack.reader.lost[0].worker_id == "worker-0" and stack.reader.lost[0].refs == (spec.ref,)
        assert not stack.reader.lost[0].is_dead
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
        lost = WorkerLost(worker_id="worker-3", incarnation=1, refs=refs)
        TermReport(Recorder("scheduler", "scheduler-0", 1)).note(PublishWorkerLost(lost))
    (record,) = caplog.records
    assert record.levelno == level and ("lost" in record.getMessage()) == bool(refs)


def cells_of(made: list[str]) -> Cells:
    """Whose cores say what they are told to."""

    def make(model: str) -> Cell:
        made.append(model)
        says = {"snapshots": 2, "queued": 1, "standstill_s": float(len(made)), "workers": [{"worker": model}]}
        core: Any = SimpleNamespace(is_empty=True, describe=lambda: says)
        return Cell(model, core, *cast(Any, (None,) * 4))

    return Cells(make)


def test_workers_belong_to_the_model_that_they_said_last() -> None:
    made: list[str] = []
    cells = cells_of(made)
    assert cells.of_worker("w") is None
    one = cells.of_report("w", "one")
    assert cells.of_worker("w") is one and cells.of_model("one") is one
    two = cells.of_report("w", "two")
    assert cells.of_worker("w") is two and made == ["one", "two"]
    assert cells.describe() == {
        "snapshots": 4,
        "queued": 2,
        "standstill_s": 2.0,
        "queue": [],
        "workers": [{"worker": "one", "model": "one"}, {"worker": "two", "model": "two"}],
    }


def test_who_names_no_model_means_the_only_one() -> None:
    cells = cells_of([])
    with pytest.raises(UnavailableError):
        cells.of_model("")
    one = cells.of_model("one")
    assert cells.of_model("") is one and cells.describe()["workers"] == [{"worker": "one"}]
    cells.of_model("two")
    with pytest.raises(UnavailableError, match="name it"):
        cells.of_model("")


def test_those_that_have_nobody_give_way() -> None:
    cells = cells_of([])
    for number in range(MOST_MODELS + 10):
        cells.of_report(f"w{number}", f"m{number}")
    assert len(cells.by_model) == MOST_MODELS
    assert cells.of_worker("w0") is None and cells.of_worker(f"w{MOST_MODELS + 9}") is not None
    for cell in cells:
        cast(Any, cell.core).is_empty = False
    with pytest.raises(Overloaded):
        cells.of_model("one more")
