"""Loopback ports: is one free, who has it, and a free one when any will do."""

import errno
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class PortOwner:
    """The process that listens on a port; `pid` is None when it belongs to somebody else."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})" if self.pid else "a process of another user"


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether one could listen there now. Raises OSError when the host is not one of this machine's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def owner(port: int) -> PortOwner:
    """Who listens on `port`."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        connections = []
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                break
            return _responsible(connection.pid)
    return PortOwner(None, "")


def _responsible(pid: int) -> PortOwner:
    """The process itself, or the stack's supervisor that would only start it again."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        words = parent.cmdline() if parent is not None else []
        if parent is not None and "up" in words and any("services" in word for word in words):
            process = parent
        return PortOwner(process.pid, " ".join(process.cmdline())[:120] or "no command line")
    except psutil.Error:
        return PortOwner(pid, "ended meanwhile")
