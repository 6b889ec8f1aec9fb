"""Fixtures for every test: a real nats-server, and buses on it that are closed afterwards."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import settings
from prometheus_client import CollectorRegistry

from shared.bus import Bus
from shared.config import BusConfig
from shared.messages import base
from tests.nats_server import NatsServer

# A shell that starts the tests in the background makes them ignore these, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a device Triton's interpreter runs kernels in host memory. It has to know before Triton is first
# imported, which in a run of all tests is by whatever uses transformers, long before a test of a kernel.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# No test serves what the user has fetched, and stacks of no named model serve Tiny Chat.
os.environ["KVASIR_CACHE"] = str(Path(__file__).parents[1] / "build" / "test-cache")

# Tests talk to this machine alone: a client does not read the certificates of the world, which takes 75 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

# How long one example takes on a busy machine says nothing of the code; pytest-timeout bounds whole tests.
# Where hypothesis sees CI it would try the same examples every time: .ci/run gives a seed, and prints it.
settings.register_profile("kvasir", max_examples=60, deadline=None, derandomize=False, print_blob=True)
settings.load_profile("kvasir")


SHARED_STACKS = ("simulated", "featured", "roomy", "stack")
"""Fixtures of `tests/stack/conftest.py`."""


def shared_by(item: pytest.Item) -> set[str]:
    """The shared stacks that a test uses."""
    found = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    return {name for name in SHARED_STACKS if name in found and found[name][-1].baseid == "tests/stack"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole stacks first: they take longest, and wait while others compute. Files with the same stacks run in
    a row, so that few stacks run at once."""
    of_file: dict[Path, set[str]] = {}
    for item in items:
        of_file.setdefault(item.path, set()).update(shared_by(item))
    ranks = {
        path: (not names, "stack" in names, *(name not in names for name in SHARED_STACKS))
        for path, names in of_file.items()
    }
    items.sort(key=lambda item: (item.get_closest_marker("stack") is None, ranks[item.path]))


class _CheckedEncoder:
    """What is sent in a test is what its reader takes: a field beyond its bounds fails at the sender."""

    def encode(self, message: msgspec.Struct) -> bytes:
        data = msgspec.msgpack.encode(message)
        base.decode(data, type(message))
        return data


base._encoder = _CheckedEncoder()  # type: ignore[assignment]

ConnectBus = Callable[..., Awaitable[Bus]]
"""`await connect_bus("worker", "worker-0")`; keywords override fields of `BusConfig`."""
MakeServer = Callable[..., NatsServer]
"""`make_server(jetstream=False, extra_config="max_payload: 2MB").start()`"""


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Makes servers that are not started yet; they are killed at the end."""
    made: list[NatsServer] = []

    def make(**settings: Any) -> NatsServer:
        directory = tmp_path / f"nats-{len(made)}"
        directory.mkdir()
        made.append(NatsServer(directory, **settings))
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def nats_server(make_server: MakeServer) -> NatsServer:
    """A running server of this test's own, JetStream included."""
    return make_server().start()


@pytest.fixture
def bus_config(nats_server: NatsServer) -> BusConfig:
    return BusConfig(url=nats_server.url, connect_timeout_s=20.0, drain_timeout_s=1.0)


@pytest_asyncio.fixture
async def connect_bus(bus_config: BusConfig) -> AsyncIterator[ConnectBus]:
    """Makes buses on the test's server, each with a registry of its own, and closes them at the end."""
    opened: list[Bus] = []

    async def connect(
        service: str = "tester",
        instance: str = "tester-0",
        registry: CollectorRegistry | None = None,
        **settings: object,
    ) -> Bus:
        config = bus_config.model_copy(update=settings)
        own = registry or CollectorRegistry()
        bus = await Bus.connect(config, service=service, instance=instance, registry=own)
        opened.append(bus)
        return bus

    yield connect
    for bus in opened:
        await bus.close()
