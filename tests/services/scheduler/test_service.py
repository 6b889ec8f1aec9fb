"""Leadership on a real nats-server: one leads, others stand by, restarts adopt, the process stops cleanly.

What a term asks others, on a real nats-server: placement and predictor absent or slow.
"""

import asyncio
import os
import signal
import sys

import pytest

from services.scheduler import leader_term
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import run
from shared.bus.departures import BusAdvisory, BusClient, connection_name
from shared.clock import monotonic_s
from shared.config import BusConfig
from shared.errors import ConfigError
from tests.patience import until
from tests.services.scheduler.bus_peers import PlacementOnBus, PredictorOnBus
from tests.services.scheduler.bus_stack import QUICK, BusStack
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


async def test_a_scheduler_with_another_policy_adopts_and_reserves_the_maximum(stack: BusStack) -> None:
    worker = await stack.worker()
    spec = stack.reader.spec("a", answer_tokens=150, max_tokens=200)
    maximum_blocks = -(-(spec.prompt_tokens + 200 - 1) // 4)
    first = await stack.scheduler("scheduler-0", policy="vllm")
    async with running(worker.run()), running(first.serve()) as leading:
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(spec)
        await until(lambda: 4 < worker.process.used_blocks < maximum_blocks)
        prefilled = sum(tokens for tokens, _ in worker.process.step_tokens)
        leading[0].cancel()
        second = await stack.scheduler("scheduler-1", policy="orca")
        async with running(second.serve()):
            await until(lambda: stack.reader.announced[-1].policy == "orca")
            await until(lambda: worker.process.used_blocks == maximum_blocks)
            await until(lambda: "a" in stack.reader.ended)
            assert sum(tokens for tokens, _ in worker.process.step_tokens) == prefilled


async def test_a_higher_epoch_makes_it_stand_for_the_lease_again(stack: BusStack) -> None:
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await asyncio.sleep(0.5)
        incarnation = stack.reader.announced[-1].incarnation
        worker.process.says["epoch"] = 1000
        await until(lambda: stack.reader.announced[-1].epoch == 1001)
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
            client = BusClient(1, other[0], connection_name(*other))
            scheduler._bus.departures.on_disconnected(BusAdvisory(client))
        await until(lambda: bool(stack.reader.lost))
        assert [(lost.worker_id, lost.incarnation) for lost in stack.reader.lost] == [start]
        assert [ref.request_id for ref in stack.reader.lost[0].refs] == ["a"]


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


async def test_the_process_survives_its_own_kill_and_stops_on_a_signal(
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
    worker, scheduler = await stack.worker(), await stack.scheduler()
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("a"))
        await asyncio.sleep(0.6)
        assert worker.plans == []
        await stack.peers.attach(PlacementOnBus.HANDLERS, stack.placement)
        await until(lambda: "a" in stack.reader.ended)


async def test_a_slow_placement_is_a_pause(stack: BusStack) -> None:
    stack.placement.delay_s = 1.0
    worker, scheduler = await stack.worker(), await stack.scheduler(place_deadline_s=0.2)
    async with running(worker.run(), scheduler.serve()):
        await until(lambda: bool(stack.reader.announced))
        await stack.reader.submit(stack.reader.spec("a"))
        await asyncio.sleep(0.7)
        stack.placement.delay_s = 0.0
        await until(lambda: "a" in stack.reader.ended)
