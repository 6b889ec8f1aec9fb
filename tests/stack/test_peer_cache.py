"""The prefix cache in another worker's host memory, live: a hit has the same text, and who lends may die."""

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from shared.messages.reports import WorkerReported
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import heartbeats
from tests.stack.test_prefix_cache import Tenant, Timed, prompt_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
BLOCK_TOKENS, PROMPT_BLOCKS, PROMPTS = 64, 5, 24
HOST_BLOCKS, LENT_BLOCKS = 8, 200
SETTINGS = (
    "worker.kv_blocks=32",
    f"worker.host_memory.blocks={HOST_BLOCKS + LENT_BLOCKS}",
    f"worker.host_memory.cache_share={HOST_BLOCKS / (HOST_BLOCKS + LENT_BLOCKS)}",
    f"worker.host_memory.lent_share={LENT_BLOCKS / (HOST_BLOCKS + LENT_BLOCKS)}",
    "worker.prefix_cache.shadow_share=0",
    f"worker.prefix_cache.peer_blocks={LENT_BLOCKS}",
    "worker.lending.lease_s=10",
)
"""Device and host hold a third of the prompts together."""


@dataclass(frozen=True)
class Filled:
    """What was answered first, and who keeps what for whom since then."""

    answers: list[Timed]
    debtor: str
    creditor: str


class PeerCache:
    """A stack whose caches are too small, and what is asked of it. Of the engine it knows the block size."""

    def __init__(self, stack: RunningStack, block_tokens: int) -> None:
        self.stack, self.block_tokens = stack, block_tokens
        self.tenant = Tenant(stack)

    def prompts(self, seed: int) -> list[list[int]]:
        size = PROMPT_BLOCKS * self.block_tokens + 5
        return [prompt_of(100 * seed + at, size) for at in range(PROMPTS)]

    def ask(self, prompts: list[list[int]], pause_s: float = 0.0) -> list[Timed]:
        found = []
        for prompt in prompts:
            found.append(self.tenant.complete(prompt))
            time.sleep(pause_s)
        return found

    def until(self, condition: str, wanted: int = 1, asking: tuple[list[int], ...] = ()) -> str:
        """The worker whose status says so many of that at least, while these prompts are asked."""
        deadline_s = time.monotonic() + STACK_PATIENCE_S
        while time.monotonic() < deadline_s:
            for name in ("worker-0", "worker-1"):
                if int(self.details(name).get(condition, 0)) >= wanted:
                    return name
            self.ask([*asking], pause_s=0.1)
            time.sleep(0.2)
        told = [self.details(name) for name in ("worker-0", "worker-1")]
        raise AssertionError(f"no worker has {condition}: {told}\n{self.stack.logs()}")

    def details(self, name: str) -> dict[str, Any]:
        """Nothing of one that is being started anew."""
        services = self.stack.status()["services"]
        return next((dict(row["details"]) for row in services if row["instance"] == name), {})

    def peer_tier(self, name: str) -> dict[str, Any]:
        return next(row for row in self.details(name)["prefix_tiers"] if row["tier"] == "peer")

    def lost_blocks(self) -> int:
        return sum(int(self.details(name).get("cache_lost_blocks", 0)) for name in ("worker-0", "worker-1"))

    def fill(self, seed: int) -> Filled:
        """More than fits: what has to leave the host is at the other worker then."""
        prompts = self.prompts(seed)
        answers = self.ask(prompts[: PROMPTS // 2])
        self.until("cache_borrowed_blocks", asking=(*prompts[: PROMPTS // 2],))
        answers += self.ask(prompts[PROMPTS // 2 :], pause_s=0.1)
        debtor = self.until("peer_blocks", PROMPTS * PROMPT_BLOCKS // 4)
        return Filled(answers, debtor, "worker-1" if debtor == "worker-0" else "worker-0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerCache]:
    settings = (*SETTINGS, f"worker.block_tokens={BLOCK_TOKENS}", "worker.pie.enabled=false")
    with running_stack(tmp_path_factory.mktemp("peers") / "run", settings=settings) as stack:
        made = PeerCache(stack, BLOCK_TOKENS)
        yield made
        made.tenant.close()


def texts(answers: list[Timed]) -> list[str]:
    return [answer.text for answer in answers]


async def check_a_hit(cache: PeerCache) -> None:
    """What left the host is in the other worker's, seen by both and in heartbeats; it is fetched on a hit.

    A busy machine may answer a creditor or renew a lease too late. Its blocks are lost then, and each is a
    miss with the same text; other prompts follow."""
    for seed in (1, 11, 21):
        filled = await asyncio.to_thread(cache.fill, seed)
        lost, hits = cache.lost_blocks(), cache.peer_tier(filled.debtor)["hits"]
        owed = cache.details(filled.debtor)["cache_borrowed_blocks"]
        async with heartbeats(cache.stack) as heard:
            await asyncio.sleep(1.0)
        last: dict[str, WorkerReported] = {report.worker_id: report for report in heard.reports}
        lender, borrower = last[filled.creditor], last[filled.debtor]
        assert borrower.capacity.borrowed_blocks == 0, "no sequence has any of it"
        again = await asyncio.to_thread(cache.ask, cache.prompts(seed))
        assert texts(again) == texts(filled.answers)
        if cache.lost_blocks() > lost:
            continue
        assert lender.capacity.host_lent_blocks == lender.host_lent_to_blocks[filled.debtor] >= owed
        assert lender.capacity.host_yielding_blocks == lender.capacity.host_lent_blocks
        assert borrower.host_borrowed_from_blocks[filled.creditor] >= owed
        assert borrower.cache is not None and borrower.cache.peer_used_blocks > 0
        tier = cache.peer_tier(filled.debtor)
        assert tier["hits"] >= hits + PROMPT_BLOCKS, tier
        assert tier["faults"] == 0 or lost > 0, tier
        return
    raise AssertionError(f"blocks were lost each time\n{cache.stack.logs()}")


def check_a_killed_creditor(cache: PeerCache) -> None:
    """What it kept is computed again, and its next life, or another one, is borrowed from."""
    filled = cache.fill(2)
    restarts = cache.stack.child(filled.creditor)["restarts"]
    cache.stack.signal(filled.creditor, signal.SIGKILL)
    again = cache.ask(cache.prompts(2))
    assert texts(again) == texts(filled.answers) and cache.until("cache_lost_blocks") == filled.debtor
    cache.stack.until_restarted(filled.creditor, restarts=restarts + 1)
    assert texts(cache.ask(cache.prompts(2), pause_s=0.1)) == texts(filled.answers)
    cache.until("cache_borrowed_blocks", asking=(*cache.prompts(2),))


async def test_a_hit_from_another_workers_host_memory_has_the_same_text(cache: PeerCache) -> None:
    await check_a_hit(cache)


def test_a_killed_creditor_is_a_miss(cache: PeerCache) -> None:
    check_a_killed_creditor(cache)
