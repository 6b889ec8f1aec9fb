"""Several simulated workers in one process: each is an instance of its own on the bus."""

import pytest
from pydantic import SecretStr, ValidationError

from services.worker.config import WorkerConfig
from services.worker.service import run
from shared import subjects
from shared.bus import Listener
from shared.config import BusConfig
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus, WorkerReported
from tests.conftest import ConnectBus
from tests.patience import until
from tests.tasks import running


def test_names_count_up_and_each_has_its_password() -> None:
    six, seven = SecretStr("six"), SecretStr("seven")
    bus, how = (
        BusConfig(user="worker-6", password=six),
        {"instance": "worker-6", "engine": "simulated", "count": 3},
    )
    crew = WorkerConfig.model_validate({**how, "bus": bus, "passwords": {"worker-7": seven}}).crew()
    told = [(one.instance, one.bus.user, one.bus.password) for one in crew]
    assert told == [
        ("worker-6", "worker-6", six),
        ("worker-7", "worker-7", seven),
        ("worker-8", "worker-8", six),
    ]
    assert all((one.count, one.passwords) == (1, {}) for one in crew)


def test_an_engine_that_computes_has_a_process_of_its_own() -> None:
    with pytest.raises(ValidationError, match="process of its own"):
        WorkerConfig(count=2)
    with pytest.raises(ValidationError, match="number to count from"):
        WorkerConfig(count=2, engine="simulated", instance="worker-a")


class Heard:
    """Heartbeats, by worker: what a worker says when all of it is there."""

    HANDLERS = (Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported", sender="worker_id"),)

    def __init__(self) -> None:
        self.incarnations: dict[str, int] = {}

    def on_reported(self, report: WorkerReported) -> None:
        self.incarnations[report.worker_id] = report.incarnation


async def test_all_of_them_are_there(bus_config: BusConfig, connect_bus: ConnectBus) -> None:
    config = WorkerConfig(bus=bus_config, engine="simulated", count=5, kv_blocks=64)
    client, heard = await connect_bus("gateway", "gateway-0"), Heard()
    await client.attach(Heard.HANDLERS, heard)
    async with running(run(config)):
        await until(lambda: len(heard.incarnations) == 5)
        found = await client.gather(
            subjects.status("worker"), Empty(), ServiceStatus, deadline_s=10.0, expected=5
        )
    assert {status.instance for status in found} == {f"worker-{number}" for number in range(5)}
    assert {status.instance: status.incarnation for status in found} == heard.incarnations
    assert len(set(heard.incarnations.values())) == 5
