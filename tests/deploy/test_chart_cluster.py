"""The chart's pods with three NATS servers. Each pod is a network namespace in which its own command runs,
with the names that a cluster's DNS would have. Only paths differ from those in a pod."""

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.stack.compose import write_secrets
from tests.deploy.test_chart import CHART, command_of, pods, rendered
from tests.stack.client import assert_same
from tests.stack.hosts import SERVERS, Fleet, Host, started
from tests.stack.prompts import long_questions

pytestmark = [pytest.mark.stack, pytest.mark.slow]
QUESTIONS = long_questions(8, least_tokens=300, step_tokens=20, longest_words=60, seed=5)
MIDWAY = 100
PAUSE_S = 2.0
"""Most that a client waits for its next token, on a machine with time to spare."""
READY = "from urllib.request import urlopen as ask; ask('http://127.0.0.1:{port}{path}', timeout=5)"


class Pods(Fleet):
    """What StatefulSets and kubelets would make of a rendered chart."""

    def __init__(self, folder: Path, objects: list[dict[str, Any]]) -> None:
        self.specs = dict(pods(objects))
        (sets,) = (
            each["spec"]
            for each in objects
            if each["metadata"]["name"] == "nats" and "template" in each["spec"]
        )
        self.settled_s: float = sets["minReadySeconds"]
        (config,) = (each for each in objects if each["kind"] == "ConfigMap")
        self.config: dict[str, str] = config["data"]
        super().__init__(folder, [(name,) for name in self.specs], {})
        self.pods = dict(zip(self.specs, self.hosts, strict=True))

    def start(self) -> None:
        write_secrets(self.secrets, nats_cluster=SERVERS)
        self.connect()
        names = "127.0.0.1 localhost\n"
        for name, host in self.pods.items():
            domain = f"{name}.{name.partition('-')[0]}"
            names += f"{host.address} {domain} {domain}.chats.svc\n"
        for name, host in self.pods.items():
            (etc := Path("/etc/netns", host.name)).mkdir(parents=True)
            (etc / "hosts").write_text(names)
            self.mount(name, host)
            self.run(name)
        for name, host in self.pods.items():
            self.await_ready(host, name)

    def mount(self, name: str, host: Host) -> None:
        """Write what the pod's volumes hold."""
        files = {path.name: path for path in self.secrets.rglob("*") if path.is_file()}
        items = [
            item for each in self.specs[name]["volumes"] for item in each.get("secret", {}).get("items", ())
        ]
        wanted = {f"secrets/{item['path']}": files[item["key"]].read_text() for item in items}
        wanted |= {f"config/{key}": text for key, text in self.config.items()}
        if not name.startswith("nats"):
            wanted[f"{name}.env"] = files[f"{name}.env"].read_text()
        for path, text in wanted.items():
            (host.folder / path).parent.mkdir(exist_ok=True)
            here = text.replace("/run/secrets", str(host.folder / "secrets"))
            (host.folder / path).write_text(here.replace('"/data', f'"{host.folder}'))

    def command(self, name: str, **other: Any) -> tuple[list[str], dict[str, str]]:
        """Return the command of the pod's container, or another one in its environment."""
        host = self.pods[name]
        places = {"/run/secrets": "secrets", "/etc/kvasir": "config", "/models": "models"}
        spec = {"containers": [{**self.specs[name]["containers"][0], **other}]}
        return command_of(
            name, spec, host.folder, {one: str(host.folder / here) for one, here in places.items()}
        )

    def run(self, name: str) -> None:
        """Start the pod's container, as its kubelet does, also after a death."""
        self.pods[name].start(name, *self.command(name))

    def details(self, name: str) -> dict[str, Any]:
        """Ask the pod's readiness probe."""
        (container,) = self.specs[name]["containers"]
        if asked := container["readinessProbe"].get("httpGet"):
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            argv = [sys.executable, "-c", READY.format(port=ports[asked["port"]], path=asked["path"])]
        else:
            argv = container["readinessProbe"]["exec"]["command"]
        argv, env = self.command(name, command=argv)
        said = self.pods[name].run(*argv, env=env)
        return {"trouble": said.stdout + said.stderr} if said.returncode else {}

    def stop(self) -> None:
        super().stop()
        for host in self.hosts:
            shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    objects = rendered(CHART / "examples" / "available.yaml")
    with started(Pods(tmp_path_factory.mktemp("pods"), objects)) as each:
        yield each


def test_chats_outlive_each_nats_pod_in_turn(running: Pods) -> None:
    """A pod is killed during chats, started again, and ready before the next one is killed."""
    gateway = list(running.pods).index("gateway-0")
    with running.asked(gateway, QUESTIONS, MIDWAY) as undisturbed:
        pass
    usual_s = max(answer.pause_s for answer in undisturbed)
    for number in range(SERVERS):
        name = f"nats-{number}"
        with running.asked(gateway, QUESTIONS, MIDWAY) as answers:
            running.pods[name].kill()
        assert_same(answers, undisturbed)
        pause_s = max(answer.pause_s for answer in answers)
        print(f"{name} killed: longest pause {pause_s:.2f} s, undisturbed {usual_s:.2f} s")
        assert pause_s <= PAUSE_S + 10 * usual_s, running.logs()
        assert running.details(name)["trouble"]
        running.run(name)
        running.await_ready(running.pods[name], name)
        time.sleep(running.settled_s)
