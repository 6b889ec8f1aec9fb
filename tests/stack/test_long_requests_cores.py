"""Many requests longer than one worker's KV at once: all of them end.

The scheduler's order, the ledger and the workers' lending, in one process on virtual time; messages of one
round arrive in any order.
"""

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.long_waits import Claim, who_may_borrow
from services.worker.peers.lending.core.watermarks import Balance, Marks
from shared.messages.reports import Capacity
from tests.stack.lending_world import BLOCKS, CAP, LendingWorld

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
        of = {
            name: one.total_blocks - one.doomed_blocks - one.borrowed_blocks
            for name, one in capacities.items()
        }
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


@settings(max_examples=60, deadline=None)
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
