"""The bus: typed commands and events over NATS. A handler table lists subjects, message types and methods;
`Bus.attach` serves it. All failures are raised as `shared.errors`. This package knows no service and no
message by name."""

from shared.bus.connection import Bus
from shared.bus.express import Express
from shared.bus.lease import Lease
from shared.bus.runtime import OwnThread, fenced, run_main, run_service
from shared.bus.serving import Endpoint, Handler, Listener, recorder_handlers, status_handlers, status_of

__all__ = [
    "Bus",
    "Endpoint",
    "Express",
    "Handler",
    "Lease",
    "Listener",
    "OwnThread",
    "fenced",
    "recorder_handlers",
    "run_main",
    "run_service",
    "status_handlers",
    "status_of",
]
