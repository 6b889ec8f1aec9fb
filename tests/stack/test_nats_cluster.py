"""A stack on three nats-servers: each is killed and frozen in turn, while clients read. One of the three
leads the replicas of the lease, and one has most connections."""

import asyncio
import signal

import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.conftest import stack_of
from tests.stack.prompts import long_questions
from tests.stack.running import RunningStack

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
