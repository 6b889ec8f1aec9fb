"""Lending of both tiers, cached blocks, requests longer than a worker: no block has two hands, all end."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.stream import StreamPhase
from services.scheduler.core.long_waits import Claim, who_may_borrow
from services.worker.peers.lending.core.borrowing import Balance, Marks
from shared.messages.lending import KvTier
from shared.messages.reports import Capacity
from tests.stack.actors import Wanted
from tests.stack.lending_world import (
    BLOCKS,
    CAP,
    GRACE_S,
    HOST_BLOCKS,
    KEEP,
    LEASE_S,
    WORKERS,
    LendingWorld,
    carry_out,
    few,
    moves,
    names,
)
from tests.stack.mixed_world import BLOCKS as MIXED_BLOCKS
from tests.stack.mixed_world import CAP as MIXED_CAP
from tests.stack.mixed_world import MixedWorld, Parts


@settings(max_examples=80)
@given(st.lists(moves, max_size=80))
def test_no_block_is_in_two_hands(moves: list[tuple[str, *tuple[float, ...]]]) -> None:
    world = LendingWorld(WORKERS, HOST_BLOCKS)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for move in moves:
        carry_out(world, move)
        world.check()


@settings(max_examples=40)
@given(st.lists(moves, max_size=60), names)
def test_what_the_dead_held_comes_back(moves: list[tuple[str, *tuple[float, ...]]], killed: int) -> None:
    world = LendingWorld(WORKERS, HOST_BLOCKS)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for move in moves:
        carry_out(world, move)
    world.kill(world.names[killed])
    for _ in range(int((LEASE_S + GRACE_S) / 0.5) + 1):
        world.deliver_all()
        world.advance(0.5)
    world.deliver_all()
    world.advance(0.0)
    world.deliver_all()
    for name, member in world.members.items():
        for debtor, blocks in member.grants.lent_to().items():
            owed = world.members[debtor].debts.borrowed_from().get(name, 0)
            assert owed == blocks, f"{name} keeps {blocks} for {debtor}, which has {owed}"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(names, few), min_size=1, max_size=12),
    st.lists(st.tuples(names, st.integers(1, 12)), max_size=8),
    st.lists(st.integers(0, 50), max_size=100),
)
def test_a_ledger_with_old_news_never_over_commits(
    needs: list[tuple[int, int]], busy: list[tuple[int, int]], order: list[int]
) -> None:
    """Creditors fill up after their heartbeats; debtors ask together on what the ledger still believes."""
    world = LendingWorld(WORKERS, HOST_BLOCKS)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for worker, blocks in busy:
        world.compute(world.names[worker], blocks)
    for worker, blocks in needs:
        world.need(world.names[worker], blocks)
    for at in order:
        if world.letters:
            world.letters.pop(at % len(world.letters)).deliver()
            world.check()
    world.deliver_all()
    lent = sum(member.grants.lent_blocks() for member in world.members.values())
    borrowed = sum(member.debts.borrowed_blocks for member in world.members.values())
    assert lent == borrowed
    for member in world.members.values():
        assert member.grants.lent_blocks(KvTier.DEVICE) <= CAP
        assert member.grants.lent_blocks(KvTier.HOST) <= HOST_BLOCKS


def test_host_memory_is_lent_where_no_device_has_anything_left_and_comes_back_with_the_lease() -> None:
    world = LendingWorld(3, HOST_BLOCKS)
    for name in world.names:
        world.compute(name, BLOCKS - KEEP - (2 if name == "w1" else 0))
        world.beat(name)
    world.deliver_all()
    world.borrow("w0", 9)
    debts = world.members["w0"].debts
    assert debts.borrowed_from(KvTier.DEVICE) == {"w1": 2}, "what a device has left goes first"
    assert debts.borrowed_from(KvTier.HOST) == {"w1": 5, "w2": 2}
    world.need("w2", 9)
    world.deliver_all()
    assert world.members["w2"].debts.borrowed_from() == {"w0": 5}, "none of what it borrowed"
    world.kill("w0")
    world.silence(int((LEASE_S + GRACE_S) / 0.5) + 1)
    for name in ("w1", "w2"):
        member = world.members[name]
        assert member.grants.lent_to() == {} and member.host.free_blocks == HOST_BLOCKS
    assert world.members["w1"].pool.free_blocks == KEEP + 2


LONG_ENOUGH_S = 120.0
ANYWHERE = Parts(placement=None, lends=True)


def serve_mixed(world: MixedWorld, starts_s: list[float]) -> float:
    """When all have ended, seconds."""
    for start_s, key in zip(starts_s, world.wanted, strict=True):
        world.at(start_s, partial(world.submit, key))
    world.run(LONG_ENOUGH_S)
    for key, stream in world.streams.items():
        assert stream.phase is StreamPhase.ENDED, world.state()
        assert stream.tokens == world.wanted[key].answer(key)
    return world.now_s


chats = st.builds(
    Wanted,
    prompt_tokens=st.integers(60, 130),
    answer_tokens=st.integers(1, 40),
    max_tokens=st.just(40),
    word=st.integers(3, 5),
)
longs = st.builds(
    Wanted,
    prompt_tokens=st.integers(MIXED_BLOCKS * 16 - 60, (MIXED_BLOCKS + MIXED_CAP) * 16 - 60),
    answer_tokens=st.integers(1, 40),
    max_tokens=st.just(40),
    word=st.integers(3, 9),
)
requests = st.tuples(st.floats(0.8, 3.0), st.one_of(chats, chats, chats, longs))


@settings(max_examples=60)
@given(st.lists(requests, min_size=1, max_size=24), st.integers(0, 2**16))
def test_all_end(load: list[tuple[float, Wanted]], seed: int) -> None:
    serve_mixed(MixedWorld(seed, [one for _, one in load], ANYWHERE, workers=2), [s for s, _ in load])


@pytest.mark.parametrize("policy", ["kvasir", "vllm"])
@pytest.mark.parametrize("lends", [False, True])
def test_blocks_that_only_the_cache_held_count_again_once_they_are_free(policy: str, lends: bool) -> None:
    """What stopped a stack for ever: of two prompts that began alike and came together the cache keeps one's
    blocks for as long as the other goes on from them. Once missed in a snapshot they were never counted
    again, and a prompt that needed them waited, while its worker had free or borrowed all it asked for."""
    twins = [Wanted(100, 1, 1), Wanted(100, 100, 100)]
    long = Wanted((MIXED_BLOCKS + MIXED_CAP // 2) * 16 if lends else MIXED_BLOCKS * 16 - 40, 20, 40, word=4)
    world = MixedWorld(1, [*twins, long], replace(ANYWHERE, lends=lends, policy=policy), workers=2)
    world.choose = lambda _: "worker-0"
    world.at(0.9, lambda: world.kill(world.scheduler, 0.3))  # the next one begins with a snapshot
    missing: list[int] = []
    world.at(1.9, lambda: missing.append(world.missing_blocks("worker-0")))
    assert serve_mixed(world, [0.1, 0.1, 4.0]) < 10.0 and missing == [6]


ROUND_S = 0.5
ROUNDS_OF_ONE = 30
"""To gather, to run, and to give back."""


@dataclass(slots=True)
class Job:
    """A request at its worker, which holds all it needs from its start to its end."""

    age: int
    name: str
    blocks: int
    rounds: int
    runs: bool = False


class LongWorld(LendingWorld):
    """`in_order` False: everybody gathers at once."""

    def __init__(self, workers: int, jobs: list[Job], dice: Random, *, in_order: bool) -> None:
        super().__init__(workers)
        self.jobs, self.dice, self.in_order = jobs, dice, in_order
        empty = Capacity(total_blocks=BLOCKS, free_blocks=BLOCKS)
        self.balances = {name: Balance(Marks(0, 0), empty) for name in self.names}
        self.ended: list[int] = []

    def capacity(self, name: str) -> Capacity:
        """Of the pool, what it has borrowed included."""
        member = self.members[name]
        busy = self.running(name)
        total = member.pool.total_blocks + len(member.used)
        borrowed_busy = 0 if busy is None else max(0, busy.blocks - len(member.own))
        borrowed_free = len(member.used) - borrowed_busy
        return Capacity(
            total_blocks=total,
            free_blocks=member.pool.free_blocks + borrowed_free,
            borrowed_blocks=len(member.used),
            borrowed_free_blocks=borrowed_free,
            most_lent_blocks=CAP,
        )

    def running(self, name: str) -> Job | None:
        return next((job for job in self.jobs if job.runs and job.name == name), None)

    def round(self) -> None:
        """Half a second of everybody."""
        capacities = {name: self.capacity(name) for name in self.names}
        needs = {claim.worker_id: claim.blocks for claim in self._wanted(capacities)}
        for name, balance in self.balances.items():
            balance.needed_blocks = needs.get(name, 0)
            balance.on_report(capacities[name])
            self.beat(name)
        for name in self.names:
            self._even_out(name)
        self.dice.shuffle(self.letters)
        self.deliver_all()
        for name in self.names:
            self.use(name, self.members[name].debts.free_blocks)
            self._work(name)
        self.advance(ROUND_S)
        self.deliver_all()

    def _wanted(self, capacities: dict[str, Capacity]) -> list[Claim]:
        claims = [Claim((0, float(job.age), (str(job.age), 0)), job.name, job.blocks) for job in self.jobs]
        of = {n: one.total_blocks - one.doomed_blocks - one.borrowed_blocks for n, one in capacities.items()}
        claims = [claim for claim in claims if claim.blocks > of[claim.worker_id]]
        return who_may_borrow(claims, capacities) if self.in_order else claims

    def _even_out(self, name: str) -> None:
        member, balance = self.members[name], self.balances[name]
        missing = balance.lacks(len(member.used), 0)
        if missing:
            self.need(name, missing)
        back = balance.spares(len(member.used), 0, sum(member.debts.wanted_back().values()))
        if back and balance.may_shrink():
            balance.on_shrunk()
            member.debts.release(member.used[len(member.used) - back :])
            del member.used[len(member.used) - back :]
            for repayment in member.debts.give_back(back):
                self._repay(member, repayment, lambda _: None)

    def _work(self, name: str) -> None:
        """One at a time; whoever fits may start."""
        job, member = self.running(name), self.members[name]
        if job is None:
            total = self.capacity(name).total_blocks
            fitting = [one for one in self.jobs if one.name == name and one.blocks <= total]
            if fitting:
                job = self.dice.choice(fitting)
                job.runs = True
                self.compute(name, min(job.blocks, member.pool.free_blocks))
            return
        job.rounds -= 1
        if job.rounds <= 0:
            if member.own:
                self.compute(name, -len(member.own))
            self.jobs.remove(job)
            self.ended.append(job.age)


def serve(world: LongWorld) -> bool:
    """Whether all end in as many rounds as they may take one after the other."""
    for _ in range(ROUNDS_OF_ONE * len(world.jobs)):
        if not world.jobs:
            return True
        world.round()
    return not world.jobs


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, list[Job]]:
    """Workers, and requests of up to what all of them have together."""
    workers = draw(st.integers(2, 4))
    longest = BLOCKS + (workers - 1) * CAP
    job = st.tuples(st.integers(0, workers - 1), st.integers(1, longest), st.integers(1, 5))
    drawn = draw(st.lists(job, min_size=1, max_size=6))
    return workers, [Job(age, f"w{at}", blocks, rounds) for age, (at, blocks, rounds) in enumerate(drawn)]


@settings(max_examples=60)
@given(loads(), st.integers(0, 2**16))
def test_all_long_requests_end(load: tuple[int, list[Job]], seed: int) -> None:
    workers, jobs = load
    world = LongWorld(workers, list(jobs), Random(seed), in_order=True)
    assert serve(world), f"ended: {world.ended}, waiting: {world.jobs}"


def test_without_an_order_two_wait_for_each_other() -> None:
    """The bug that the order cures: each has lent what it then borrows."""
    pair = [(0, "w0", 18), (1, "w1", 18)]
    wedged = LongWorld(2, [Job(*job, rounds=3) for job in pair], Random(1), in_order=False)
    assert not serve(wedged)
    cured = LongWorld(2, [Job(*job, rounds=3) for job in pair], Random(1), in_order=True)
    assert serve(cured) and cured.ended == [0, 1]
