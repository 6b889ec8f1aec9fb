"""The gateway's listeners: uvicorn with bounded connections."""

import contextlib
import math
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.gateway.config import GatewayConfig
from services.gateway.http.connection import ConnectionTable, ServerConfig
from shared.errors import ConfigError

BACKLOG = 2048
SPARE_DESCRIPTORS = 256
"""File descriptors kept for all but client connections: the bus, logs, the operator's listener."""
OPERATOR_CONNECTIONS = 64


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, setting: str, *, is_shared: bool = False) -> socket.socket:
    """Bind a socket; `is_shared` shares the port. Raises ConfigError naming `setting` on failure."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        text = f"cannot listen on {host}:{port}: {error.strerror}; set another {setting}"
        raise ConfigError(text, param=setting) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the listener's URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: ASGIApp, config: GatewayConfig) -> Server:
    """Return the clients' server. Run `serve(sockets=[listener])`; end it with `should_exit = True`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = max(1, min(config.max_connections, hard - SPARE_DESCRIPTORS))
    return _server(app, config, limit, config.max_connections_per_address)


def make_operator_server(app: ASGIApp, config: GatewayConfig) -> Server:
    """Return the operator's server, whose connections clients cannot use up. Run it like the other."""
    return _server(app, config, OPERATOR_CONNECTIONS, OPERATOR_CONNECTIONS)


def _server(app: ASGIApp, config: GatewayConfig, limit: int, limit_per_address: int) -> Server:
    settings = ServerConfig(
        app,
        config,
        ConnectionTable(limit, limit_per_address),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(config.keep_alive_s),
        timeout_graceful_shutdown=math.ceil(config.shutdown_grace_s) + 1,
    )
    return Server(settings)
