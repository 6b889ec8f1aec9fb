"""Four hosts on one network: three nats-servers, two gateways, two schedulers, two placements, a worker on
each. Cables are pulled and hosts die while clients read: answers stay whole and unchanged."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.hosts import Fleet, fleet
from tests.stack.prompts import long_questions

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LAYOUT = (
    ("gateway-0", "predictor-0", "worker-0"),
    ("gateway-1", "scheduler-0", "placement-0", "worker-1"),
    ("scheduler-1", "placement-1", "worker-2"),
    ("ledger-0", "worker-3"),
)
SETTINGS = {
    "KVASIR_WORKER__KV_BLOCKS": "1024",
    "KVASIR_SCHEDULER__REFUSE_WAIT_S": "0",
    "KVASIR_SCHEDULER__SHADOW_FROM_S": "0.01",  # or fast machines copy nothing of answers as short as these
}
STREAMS, MIDWAY, LASTS_S = 16, 100, 10.0
PAUSE_S = 2.0
"""Most that a client waits for its next token, on a machine with time to spare."""
SETTLED_S = 12.0
"""After a fault, the replicas of the lease may be without a leader for as long."""


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(Fleet(tmp_path_factory.mktemp("hosts"), LAYOUT, SETTINGS)) as running:
        yield running


def questions() -> list[Question]:
    return long_questions(STREAMS, least_tokens=400, step_tokens=20, longest_words=60, seed=4)


def ask(hosts: Fleet, during: Callable[[], None], at: int = 0) -> list[Answer]:
    time.sleep(SETTLED_S)
    with hosts.asked(at, questions(), MIDWAY) as answers:
        during()
    return answers


@pytest.fixture(scope="module")
def undisturbed(four_hosts: Fleet) -> list[Answer]:
    return ask(four_hosts, lambda: None)


def check(answers: list[Answer], undisturbed: list[Answer], what: str, hosts: Fleet) -> None:
    """Same answers, and no longer pause than stated, on a machine with time to spare."""
    pauses = sorted(answer.pause_s for answer in answers)
    usual_s = max(answer.pause_s for answer in undisturbed)
    print(
        f"{what}: pauses {pauses[len(pauses) // 2]:.2f} (median) to {pauses[-1]:.2f} s; usual {usual_s:.2f} s"
    )
    assert_same(answers, undisturbed)
    assert pauses[-1] <= PAUSE_S + 10 * usual_s, hosts.logs()


def test_workers_copy_shadows_to_other_hosts_over_tcp(four_hosts: Fleet, undisturbed: list[Answer]) -> None:
    workers = [four_hosts.details(f"worker-{number}") for number in range(len(LAYOUT))]
    assert sum(worker["given_as_shadows_blocks"] for worker in workers) > 0, workers


def test_a_slow_link(four_hosts: Fleet, undisturbed: list[Answer]) -> None:
    four_hosts.hosts[3].limit("2mbit")
    try:
        answers = ask(four_hosts, lambda: None)
    finally:
        four_hosts.hosts[3].limit()
    check(answers, undisturbed, "slow link", four_hosts)


@pytest.mark.parametrize("pair", [(2, 3), (0, 3), (1, 2)])
def test_two_hosts_lose_each_other(
    four_hosts: Fleet, undisturbed: list[Answer], pair: tuple[int, int]
) -> None:
    """Servers forward nothing for each other, so clients of two that lose each other move to the third."""
    one, other = (four_hosts.hosts[number] for number in pair)

    def part() -> None:
        for is_in_reach in (False, True):
            one.reach(other, is_in_reach=is_in_reach)
            other.reach(one, is_in_reach=is_in_reach)
            if not is_in_reach:
                time.sleep(LASTS_S)

    answers = ask(four_hosts, part)
    check(answers, undisturbed, f"hosts {pair} lose each other", four_hosts)


@pytest.mark.parametrize("number", [3, 2, 1])
def test_a_host_cut_off_and_back(four_hosts: Fleet, undisturbed: list[Answer], number: int) -> None:
    def cut() -> None:
        four_hosts.hosts[number].plug(is_in=False)
        time.sleep(LASTS_S)
        four_hosts.hosts[number].plug(is_in=True)

    answers = ask(four_hosts, cut)
    check(answers, undisturbed, f"host {number} cut off", four_hosts)


@pytest.mark.parametrize("number", [3, 2])
def test_a_host_that_dies(four_hosts: Fleet, undisturbed: list[Answer], number: int) -> None:
    answers = ask(four_hosts, four_hosts.hosts[number].kill)
    check(answers, undisturbed, f"host {number} dies", four_hosts)
