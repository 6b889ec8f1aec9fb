"""Fixtures for tests of the scheduler on a real nats-server."""

import pytest_asyncio

from shared.config import BusConfig
from tests.conftest import ConnectBus
from tests.services.scheduler.bus_stack import BusStack


@pytest_asyncio.fixture
async def stack(connect_bus: ConnectBus, bus_config: BusConfig) -> BusStack:
    stack = BusStack(connect_bus, bus_config)
    await stack.start()
    return stack
