"""Hosts that share nothing but a network: each is a network namespace with an address of its own, on one
bridge. Each has a folder of its own with what `services.stack.compose --hosts` made for its instances."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.stack import compose
from services.stack.container import variables
from tests.nats_server import nats_server_binary
from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Question
from tests.stack.running import ROOT

SERVERS = 3
_numbers = itertools.count()
_NOWHERE = "02:00:00:00:00:ff"
"""Hardware address of no machine."""


def obstacle() -> str:
    """Why this machine cannot have such hosts; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no `ip`: apt-get install iproute2"
    made = subprocess.run(
        ["ip", "netns", "add", f"kv{os.getpid()}"], capture_output=True, text=True, check=False
    )
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    ip("netns", "del", f"kv{os.getpid()}")
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """One namespace and its processes."""

    def __init__(self, number: int, net: str, folder: Path) -> None:
        self.name, self.address = f"{net}h{number}", f"10.77.0.{number + 1}"
        self.port = f"{net}v{number}"
        """Of the bridge."""
        self.folder, self.net = folder, net
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def connect(self) -> None:
        """Make the namespace and plug it into the bridge."""
        self.folder.mkdir()
        ip("netns", "add", self.name)
        ip(
            "link",
            "add",
            self.port,
            "netns",
            self.net,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.name,
        )
        ip("-n", self.net, "link", "set", self.port, "master", "br0", "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *argv],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "KVASIR_CACHE": str(self.folder), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """All its processes, at once."""
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def plug(self, *, is_in: bool) -> None:
        """Pull its cable, or plug it in again."""
        ip("-n", self.net, "link", "set", self.port, "up" if is_in else "down")

    def reach(self, other: "Host", *, is_in_reach: bool) -> None:
        """Lose what goes to the other host, or no more."""
        if is_in_reach:
            ip("-n", self.name, "neigh", "del", other.address, "dev", "eth0")
        else:
            entry = ("lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")
            ip("-n", self.name, "neigh", "replace", other.address, *entry)

    def limit(self, rate: str = "") -> None:
        """Limit the rate of what it sends; empty: no more."""
        shape = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "200ms") if rate else ("root",)
        verb = "replace" if rate else "del"
        words = ["tc", "-n", self.name, "qdisc", verb, "dev", "eth0", *shape]
        subprocess.run(words, check=True, capture_output=True)

    def run(self, *argv: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """A program that runs there, to its end."""
        words, env = ["ip", "netns", "exec", self.name, *argv], {**os.environ, **env}
        return subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=STACK_PATIENCE_S, check=False
        )


class Fleet:
    """A bus of three servers, and the services on four hosts."""

    def __init__(self, folder: Path, layout: Sequence[Sequence[str]], settings: Mapping[str, str]) -> None:
        self.folder, self.layout, self.settings = folder, layout, settings
        self.net = f"kv{os.getpid() % 10_000}{next(_numbers)}"
        self.hosts = [Host(number, self.net, folder / f"host-{number}") for number in range(len(layout))]
        self.secrets = folder / "secrets"

    def start(self) -> None:
        compose.write_secrets(self.secrets, hosts=[host.address for host in self.hosts[:SERVERS]])
        self.connect()
        for number, host in enumerate(self.hosts[:SERVERS]):
            self._move(host, "tls")
            text = (self.secrets / f"nats-{number}.conf").read_text()
            (host.folder / "nats.conf").write_text(text.replace(str(self.secrets), str(host.folder)))
            host.start("nats", [nats_server_binary(), "-c", str(host.folder / "nats.conf")], {})
        for host in self.hosts[SERVERS:]:
            self._move(host, "tls")
        for host, names in zip(self.hosts, self.layout, strict=True):
            for name in names:
                service = name.partition("-")[0]
                argv = [sys.executable, "-m", f"services.{service}", "--instance", name]
                host.start(name, argv, self.environment(host, name))
        for host, names in zip(self.hosts, self.layout, strict=True):
            for name in names:
                self.await_ready(host, name)

    def connect(self) -> None:
        """Make the bridge and all hosts."""
        ip("netns", "add", self.net)
        ip("-n", self.net, "link", "add", "br0", "type", "bridge")
        ip("-n", self.net, "link", "set", "br0", "up")
        for host in self.hosts:
            host.connect()

    def environment(self, host: Host, name: str) -> dict[str, str]:
        """Return the host's settings: its instances' credentials, and the servers, the nearest first."""
        service = name.partition("-")[0]
        file = self.secrets / ("workers" if service == "worker" else "") / f"{name}.env"
        told = variables(file)
        at = self.hosts.index(host) % SERVERS
        urls = [f"tls://{each.address}:4222" for each in self.hosts[:SERVERS]]
        told["KVASIR_BUS__URL"] = ",".join([*urls[at:], *urls[:at]])
        told["KVASIR_BUS__TLS_CA"] = str(host.folder / "tls" / "ca.pem")
        own = {"HOST": host.address} if service == "gateway" else {}
        if service == "worker":
            own = {"BULK__BIND": host.address, "BULK__ADVERTISE": host.address}
        told |= {f"KVASIR_{service.upper()}__{key}": value for key, value in own.items()}
        section = f"KVASIR_{service.upper()}__"
        return told | {key: value for key, value in self.settings.items() if key.startswith(section)}

    def details(self, name: str) -> dict[str, Any]:
        """Return the status of an instance."""
        host = next(host for host, names in zip(self.hosts, self.layout, strict=True) if name in names)
        argv = (sys.executable, "-m", "services.stack.healthcheck", name)
        said = host.run(*argv, env=self.environment(host, name))
        if said.returncode or name.startswith("gateway"):
            return {"trouble": said.stdout + said.stderr} if said.returncode else {}
        return dict(json.loads(said.stdout))

    @property
    def key(self) -> str:
        return (self.secrets / "api_key").read_text().strip()

    @contextmanager
    def asked(self, at: int, questions: Sequence[Question], after: int) -> Iterator[list[Answer]]:
        """Ask the gateway of a host from there. The block runs once `after` chunks have come; at its end, the
        list has the answers."""
        host, answers = self.hosts[at], list[Answer]()
        job = {
            "url": f"http://{host.address}:8080",
            "key": self.key,
            "model": "tiny_chat",
            "after": after,
            "questions": [[question.prompt, question.fields] for question in questions],
        }
        argv = ["ip", "netns", "exec", host.name, sys.executable, "-m", "tests.stack.client", json.dumps(job)]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            try:
                assert client.stdout.readline().strip() == "midway", self.logs()
                yield answers
                answers += [Answer(**each) for each in json.loads(client.stdout.readline())]
            finally:
                client.kill()

    def logs(self, lines: int = 6) -> str:
        logs = sorted(self.folder.glob("host-*/*.log"))
        tails = (log.read_text(errors="replace").splitlines()[-lines:] for log in logs)
        return "\n".join(f"--- {log}\n" + "\n".join(tail) for log, tail in zip(logs, tails, strict=True))

    def stop(self) -> None:
        for host in self.hosts:
            host.kill()
        for name in (*(host.name for host in self.hosts), self.net):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _move(self, host: Host, name: str) -> None:
        shutil.copytree(self.secrets / name, host.folder / name, dirs_exist_ok=True)

    def await_ready(self, host: Host, name: str) -> None:
        deadline_s = time.monotonic() + 2 * STACK_PATIENCE_S
        while trouble := self.details(name).get("trouble"):
            assert host.processes[name].poll() is None, f"{name} ended\n{self.logs()}"
            assert time.monotonic() < deadline_s, f"{name}: {trouble}\n{self.logs()}"
            time.sleep(0.5)


AnyFleet = TypeVar("AnyFleet", bound=Fleet)


@contextmanager
def fleet(running: AnyFleet) -> Iterator[AnyFleet]:
    """A fleet for the length of a `with` block, which leaves nothing behind; else skip the test."""
    if why := obstacle():
        pytest.skip(why)
    with ExitStack() as ending:
        ending.callback(running.stop)
        running.start()
        yield running
