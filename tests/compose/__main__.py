"""`make compose-test`: builds the image, runs the stack, kills a worker's container, swaps a service.

Answers are compared with those of before the kill: greedy and seeded, so they must be the same, word for
word.
"""

import argparse
import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench.kit.load import Answer as Answered
from bench.kit.load import Target, complete, insist
from services.stack.compose import KEY_FILE, write_secrets
from tests.compose.containers import MODEL, WORKERS, CannotRun, Project, docker, find_compose, state_of, until
from tests.compose.image import check_image
from tests.stack.client import Answer, Client, Question
from tests.stack.prompts import ASKED
from tests.stack.running import ROOT

SERVICES = ("nats", "scheduler", "predictor", "placement", "ledger", "worker")
"""There are `WORKERS` of the last one, and two gateways, called otherwise in the host's network."""
BEST_FIT = "deploy/compose.best-fit.yml"
STREAMS, TOKENS, BATCH = 8, 120, 120
TURN = {"role": "user", "content": "Tell me of a ship."}
_ANSWER_S = 180.0
MIDWAY = 100
"""Chunks over all streams when the worker is killed: an eighth or so of what is to come."""

KILL_WORKER = """
import os, pathlib, signal
for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
    line = pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    if process not in (1, os.getpid()) and b"services.worker" in line:
        os.kill(process, signal.SIGKILL)
"""
"""Run inside the container, where 1 is its init."""


def main() -> int:
    """0 when everything held, 2 when this machine cannot run it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m tests.compose")
    parser.add_argument("--base", help="image to build on; default: the Dockerfile's")
    parser.add_argument("--host-network", action="store_true", help="for a Docker that cannot make networks")
    arguments = parser.parse_args()
    try:
        compose = find_compose()
    except CannotRun as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        shutil.copytree(ROOT / "models" / "tiny_chat", models / MODEL)
        project = Project(compose, arguments.base, arguments.host_network, Path(folder) / "s", models)
        say(f"project {project.name}, {'the host' if project.host_network else 'its own'} network")
        try:
            check(project)
        except BaseException:
            for service in (*SERVICES, *project.gateways):
                show_log(project, service)
            raise
        finally:
            project.end()
        assert project.containers() == [], "containers are left"
    say("everything held; nothing is left but the build cache")
    return 0


def check(project: Project) -> None:
    """The whole story. Raises AssertionError, CalledProcessError."""
    write_secrets(project.folder)
    key = (project.folder / KEY_FILE).read_text().strip()
    client = Client(project.url, key, MODEL)
    project.run("build", "nats")
    for found in check_image():
        say(f"the image: {found}")
    began_s = time.monotonic()
    project.up()
    project.until_healthy(*SERVICES, *project.gateways)
    names = sorted(project.workers())
    assert names == [f"worker-{number}" for number in range(WORKERS)], names
    count, took_s = len(SERVICES) + 1 + WORKERS, time.monotonic() - began_s
    say(f"healthy, all {count} containers, {took_s:.0f} s after `up`")
    check_hardening(project)
    assert httpx.get(f"{project.url}/v1/models", timeout=10).status_code == 401
    undisturbed = ask(client)
    say(f"chat through {project.url}: {undisturbed[0].text[:60]!r}")
    check_kill(project, client, undisturbed)
    asyncio.run(check_gateway_kill(project, key))
    check_batch(project, key)
    check_restart(project)
    check_override(project)
    assert_same(ask(client), undisturbed)
    say("the same answers from the swapped stack")


def check_hardening(project: Project) -> None:
    """Nobody is root, no container can write to its image or see another service's password."""
    workers = project.workers()
    others = {name: project.container(name) for name in (*SERVICES[:-1], *project.gateways)}
    for service, container in (workers | others).items():
        state = state_of(container)
        assert docker("exec", container, "id", "--user").strip() == "10001", service
        host = state["HostConfig"]
        assert host["ReadonlyRootfs"] and host["Init"] and host["CapDrop"] == ["ALL"], service
        users = [name for name in state["Config"]["Env"] if name.startswith("KVASIR_BUS__USER=")]
        name = service.removesuffix("-host")
        instance = name if name[-1].isdigit() else f"{name}-0"
        apart = service == "nats" or service in workers  # a worker's is in the pool that it mounts
        assert users == ([] if apart else [f"KVASIR_BUS__USER={instance}"]), (service, users)
        mounts = {each["Destination"] for each in state["Mounts"]}
        assert ("/run/kvasir/workers" in mounts) == (service in workers), (service, mounts)
        passwords = [name for name in state["Config"]["Env"] if "PASSWORD" in name]
        assert len(passwords) == len(users), f"{service} holds another's password"
        if service in workers:
            continue
        urls = [name for name in state["Config"]["Env"] if name.startswith("KVASIR_BUS__URL=")]
        assert all(url.startswith("KVASIR_BUS__URL=tls://") for url in urls), (service, urls)
    say("non-root, read-only, each with its own NATS user, over TLS")


def check_kill(project: Project, client: Client, undisturbed: list[Answer]) -> None:
    """A worker's container is killed under its streams; then one chat without it; then it comes back."""
    busy: list[int] = []
    killed = project.container("worker-1")

    async def kill() -> None:
        worker = await asyncio.to_thread(project.status, "worker-1", "worker")
        busy.append(worker["total_blocks"] - worker["free_blocks"])
        await asyncio.to_thread(docker, "kill", killed)

    answers = asyncio.run(client.ask_all(questions(TOKENS * 8), midway=kill, after=MIDWAY))
    whole = [answer.complete and answer.completion_tokens == TOKENS * 8 for answer in answers]
    assert all(whole), [answer.errors for answer in answers]
    assert busy[0] > 0, "the worker had nothing to do when it was killed"
    assert state_of(killed)["State"]["Status"] == "exited"
    for answer, before in zip(answers, undisturbed, strict=True):
        assert answer.text.startswith(before.text), (answer.text, before.text)
    say(f"worker-1 killed while it held {busy[0]} blocks; {len(answers)} answers complete and unchanged")
    assert_same(ask(client), undisturbed)
    say("the same answers from the other workers")
    project.up()
    project.until_healthy("worker", project.gateway)
    assert project.container("worker-1") == killed, "it did not take the free name"


async def check_gateway_kill(project: Project, key: str) -> None:
    """A gateway's container is killed under its streams: who asks the other one by the same name gets all of
    the answer, once, as it was before."""
    first = Target(project.port, MODEL, key)
    other = Target(project.port_1, MODEL, key)
    bodies = [
        {"prompt": prompt, "max_tokens": TOKENS * 12, "ignore_eos": True, "temperature": 0.8, "seed": number}
        for number, prompt in enumerate(ASKED[:STREAMS])
    ]
    undisturbed = await asyncio.gather(*(complete(other, body, _ANSWER_S) for body in bodies))
    assert all(answer.ok for answer in undisturbed), [answer.error for answer in undisturbed]

    broken: list[int] = []

    async def moved(number: int, body: dict[str, Any]) -> Answered:
        name = f"compose-{project.name}-{number}"
        answer = await complete(dataclasses.replace(first, idempotency_key=name), body, _ANSWER_S)
        if answer.ok:
            return answer
        broken.append(number)
        return await insist(other, body, name, _ANSWER_S)

    asked = [asyncio.create_task(moved(number, body)) for number, body in enumerate(bodies)]
    await asyncio.sleep(1.0)
    await asyncio.to_thread(docker, "kill", project.container(project.gateway))
    answers = await asyncio.gather(*asked)
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert len(broken) >= STREAMS // 2, "most were over before the gateway was killed"
    say(f"{project.gateway} killed; {len(broken)} answers go on at {project.gateways[1]}, unchanged")
    project.up()
    project.until_healthy(*project.gateways)


def check_batch(project: Project, key: str) -> None:
    """A batch goes on in new containers: its file is in a volume."""
    lines = []
    for number in range(BATCH):
        body = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "messages": [TURN], "seed": number}
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{project.url}/v1", headers=headers, timeout=30) as http:
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", "\n".join(lines))}
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        asked["input_file_id"] = http.post("/files", files=form).raise_for_status().json()["id"]
        batch = http.post("/batches", json=asked).raise_for_status().json()["id"]

        def found() -> dict[str, Any]:
            told: dict[str, Any] = http.get(f"/batches/{batch}").raise_for_status().json()
            return told

        until(
            lambda: found()["request_counts"]["completed"] < 3 and "no answers", "a batch stands still", 120
        )
        before = found()["request_counts"]["completed"]
        assert before < BATCH, "the batch was over before the restart"
        project.run("rm", "--stop", "--force", *project.gateways)
        project.up()
        project.until_healthy(*project.gateways)
        until(lambda: (told := found())["status"] != "completed" and told, "a batch is not done", 300)
        output = http.get(f"/files/{found()['output_file_id']}/content").raise_for_status().text
    ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert ids == [f"r{number}" for number in range(BATCH)]
    say(f"a batch of {BATCH} goes on after {before} answers, in new gateways, and is whole")


def check_restart(project: Project) -> None:
    """A process that dies by itself is brought back by Docker."""
    container = project.container("worker-0")
    before = state_of(container)["RestartCount"]
    subprocess.run(("docker", "exec", container, "python", "-c", KILL_WORKER), check=False, timeout=60)
    until(lambda: state_of(container)["RestartCount"] == before, "not restarted", 60)
    took_s = project.until_healthy("worker")
    say(f"worker-0 died, Docker restarted it, healthy {took_s:.0f} s later")


def check_override(project: Project) -> None:
    """An override file swaps placement; every other container stays what it was."""
    kept = [name for name in (*SERVICES[:-1], *project.gateways, *project.workers()) if name != "placement"]
    others = {name: project.container(name) for name in kept}
    old = project.container("placement")
    assert project.status("placement", "placement-0")["policy"] == "prefix_aware"
    project.run("up", "--detach", "placement", overrides=(BEST_FIT,))
    project.until_healthy("placement", project.gateway)
    assert project.container("placement") != old
    assert {name: project.container(name) for name in kept} == others
    policy = project.status("placement", "placement-0")["policy"]
    assert policy == "best_fit"
    say(f"placement swapped by {BEST_FIT}: {policy}, no other container touched")


def questions(tokens: int) -> list[Question]:
    """Greedy and seeded in turn."""
    seeded = {"temperature": 0.8, "top_p": 0.9}
    limits = {"max_tokens": tokens, "ignore_eos": True}
    return [
        Question(prompt, {**limits, **({"temperature": 0} if i % 2 == 0 else {**seeded, "seed": i})})
        for i, prompt in enumerate(ASKED[:STREAMS])
    ]


def ask(client: Client) -> list[Answer]:
    """Complete answers, all at once. Raises AssertionError."""
    answers = asyncio.run(client.ask_all(questions(TOKENS)))
    assert all(a.complete and a.completion_tokens == TOKENS for a in answers), [a.errors for a in answers]
    return answers


def assert_same(answers: list[Answer], before: list[Answer]) -> None:
    texts = [[answer.text for answer in group] for group in (answers, before)]
    assert texts[0] == texts[1], json.dumps(texts, indent=1)


def show_log(project: Project, service: str) -> None:
    """The last lines of every container that is not well, for whoever has to find out why."""
    for container in project.containers(f"label=com.docker.compose.service={service}"):
        print(
            f"--- {service}: {docker('inspect', '--format', '{{json .State}}', container)}", file=sys.stderr
        )
        subprocess.run(("docker", "logs", "--tail", "30", container), check=False, timeout=60)


def say(text: str) -> None:
    print(f"compose-test: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
