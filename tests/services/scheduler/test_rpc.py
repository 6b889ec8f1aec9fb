"""What a term asks others, on a real nats-server: placement and predictor absent or slow."""

import asyncio

from tests.services.scheduler.bus_peers import PlacementOnBus, PredictorOnBus
from tests.services.scheduler.bus_stack import BusStack, running, until


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
