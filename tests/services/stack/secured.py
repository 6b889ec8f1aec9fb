"""nats-server on the configuration that a stack generates."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.stack import nats_server, obstructions
from services.stack.access import BusAccess, certificate_for
from services.stack.config import StackConfig
from services.stack.probes import listens
from services.stack.process import ChildProcess
from services.stack.rundir import RunDirectory
from tests.patience import PATIENCE_S


@asynccontextmanager
async def secured_server(
    directory: Path, config: StackConfig | None = None, users: tuple[str, ...] = ()
) -> AsyncIterator[BusAccess]:
    """Runs it, and tells how to get in; `users` beside a stack's own."""
    run, config = RunDirectory(directory), config or StackConfig()
    run.create()
    access = BusAccess.to(
        [obstructions.free_port()],
        run.credentials(*config.instances, *users),
        certificate_for(config, run.path / "tls"),
    )
    path = run.path / "nats.conf"
    nats_server.write_config(path, config, access, run.path / "nats")
    log = run.path / "nats.log"
    server = ChildProcess.start([nats_server.binary(), "-c", str(path)], os.environ, directory, log)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while await listens(access.ports[0]):
                await asyncio.sleep(0.01)
        run.write_state(
            {"pid": os.getpid(), **access.state(), "children": [{"name": "nats", "pid": server.pid}]}
        )
        yield access
    finally:
        server.kill()
        await server.wait()
