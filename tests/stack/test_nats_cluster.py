"""A stack on three nats-servers: each is killed and frozen in turn, while clients read. One of the three
leads the replicas of the lease, and one has most connections."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from services.stack.obstructions import free_port
from tests.nats_server import nats_server_binary
from tests.patience import STACK_PATIENCE_S
from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import long_questions
from tests.stack.running import ROOT, RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS, MIDWAY = 12, 100
SERVERS = ("nats-0", "nats-1", "nats-2")
PAUSE_S = 2.0
"""Most that a client waits for its next token, on a machine with time to spare."""
clustered = stack_of("clustered", flags=("--nats-cluster", "3", "--nats-port", "0"))


def questions() -> list[Question]:
    return long_questions(STREAMS, least_tokens=300, step_tokens=10, longest_words=60, seed=3)


@pytest.fixture(scope="module")
def undisturbed(clustered: RunningStack) -> list[Answer]:
    return clustered.answers(questions())


def check(answers: list[Answer], undisturbed: list[Answer], what: str) -> None:
    """Same answers, and no longer pause than stated; a machine that is busy pauses by itself."""
    assert_same(answers, undisturbed)
    longest_s, usual_s = (max(answer.pause_s for answer in each) for each in (answers, undisturbed))
    print(f"{what}: longest pause {longest_s:.2f} s, undisturbed {usual_s:.2f} s")
    assert longest_s <= PAUSE_S + 10 * usual_s


@pytest.mark.parametrize("server", SERVERS)
async def test_a_killed_server(clustered: RunningStack, undisturbed: list[Answer], server: str) -> None:
    check(await clustered.ask_and_kill(questions(), MIDWAY, server), undisturbed, f"{server} killed")


@pytest.mark.parametrize("server", SERVERS)
async def test_a_server_that_hangs(clustered: RunningStack, undisturbed: list[Answer], server: str) -> None:
    """The supervisor replaces it after 5 s."""
    before = clustered.child(server)["restarts"]

    async def freeze() -> None:
        clustered.signal(server, signal.SIGSTOP)

    answers = await clustered.client().ask_all(questions(), midway=freeze, after=MIDWAY)
    check(answers, undisturbed, f"{server} hung")
    await asyncio.to_thread(clustered.until_restarted, server, restarts=before + 1)
    assert clustered.child("scheduler-0")["restarts"] == 0


def site_config(hub: RunningStack, port: int, hub_port: int, worker: str) -> str:
    """Return the configuration of a site's nats-server as docs/hosts.md describes it."""
    before, _, rest = (hub.run_dir / "nats.conf").read_text().partition("    users: [\n")
    users = next(line for line in rest.splitlines() if f'user: "{worker}"' in line)
    accounts = re.sub(
        r"    jetstream \{.*?\n    \}\n", "", before[before.index("system_account") :], flags=re.S
    )
    remote = f'{{ urls: ["nats-leaf://site:secret@127.0.0.1:{hub_port}"], account: "KVASIR" }}'
    return (
        f'listen: "127.0.0.1:{port}"\nserver_name: "site"\nmax_payload: 8388608\n'
        f"leafnodes {{ remotes: [ {remote} ] }}\n{accounts}    users: [\n{users}\n    ]\n  }}\n}}\n"
    )


@contextmanager
def program(argv: list[str], env: dict[str, str]) -> Iterator[None]:
    with subprocess.Popen(argv, cwd=ROOT, env=env) as process:
        try:
            yield
        finally:
            process.kill()


async def test_a_worker_at_a_leaf_node_serves_chats_of_the_hub(tmp_path: Path) -> None:
    port, hub_port = free_port(), free_port()
    with running_stack(tmp_path / "run", workers=1) as hub, ExitStack() as ending:
        expected = await hub.client().ask_all(questions())
        config = hub.run_dir / "nats.conf"
        told = dict(line.split("=", 1) for line in hub.command("credentials", "worker-7").stdout.split())
        leaf = f'leafnodes {{ listen: "127.0.0.1:{hub_port}"\n'
        leaf += '  authorization { user: "site", password: "secret", account: "KVASIR" } }\n'
        config.write_text(leaf + config.read_text())
        hub.signal("nats", signal.SIGKILL)
        await asyncio.to_thread(hub.until_restarted, "nats", restarts=1)
        (tmp_path / "site.conf").write_text(site_config(hub, port, hub_port, "worker-7"))
        worker = [sys.executable, "-m", "services.worker", "--instance", "worker-7", "--kv_blocks", "1024"]
        told |= {"KVASIR_BUS__URL": f"nats://127.0.0.1:{port}", "KVASIR_WORKER__MODEL": str(hub.model)}
        for argv in ([nats_server_binary(), "-c", str(tmp_path / "site.conf")], worker):
            ending.enter_context(program(argv, {**os.environ, **told}))

        def steps_s() -> float:
            rows = {row["instance"]: row["details"] for row in hub.status()["services"]}
            return float(rows["worker-7"]["engine_s"]) if rows.get("worker-7", {}).get("epoch") else -1.0

        async def until_computed(least_s: float) -> float:
            """A busy machine's status may lack a worker for a moment."""
            async with asyncio.timeout(STACK_PATIENCE_S):
                while (found_s := await asyncio.to_thread(steps_s)) < least_s:
                    await asyncio.sleep(0.2)
            return found_s

        before_s = await until_computed(0.0)
        assert_same(await hub.ask_and_kill(questions(), MIDWAY, "worker-0"), expected)
        await until_computed(before_s + 0.1)
