"""The roll call over a real bus."""

import time

import pytest

from services.predictor.batching import Batcher
from services.predictor.models import create
from services.predictor.service import HANDLERS, Predictor
from services.stack.roll_call import RollCall, StatusProbe
from shared.config import BusConfig
from shared.errors import BusUnavailable
from tests.conftest import ConnectBus


async def test_who_answers_is_ready_unless_it_is_the_one_before(
    bus_config: BusConfig, connect_bus: ConnectBus
) -> None:
    roll = RollCall(bus_config)
    probe = StatusProbe(roll, "predictor", "predictor-0")
    assert await probe.obstacle(0.0) == "does not answer on the bus yet"
    bus = await connect_bus("predictor", "predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, Batcher(create("constant"))))
    assert await probe.obstacle(0.0) is None
    assert await StatusProbe(roll, "predictor", "predictor-1").obstacle(0.0) is not None
    assert await probe.obstacle(time.time()) is not None, "answers of an earlier process do not count"
    statuses = await roll.ask_all({"predictor": 1}, deadline_s=0.5)
    assert [status.instance for status in statuses] == ["predictor-0"]
    await roll.close()
    await roll.close()
    with pytest.raises(BusUnavailable):
        await roll.ask("predictor", deadline_s=0.1)
