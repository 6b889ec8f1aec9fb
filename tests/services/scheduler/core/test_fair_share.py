"""Schedulers that come and go divide the shards evenly, and leave none without a leader."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.fair_share import FairShare, surplus
from shared.messages.reports import SchedulerPresent

TTL_S = 3.0


class Instances:
    """Schedulers on virtual time: a free shard goes to the first whose patience is over."""

    def __init__(self, shards: int) -> None:
        self.shards, self.now_s = shards, 100.0
        self.alive: dict[str, tuple[FairShare, set[int]]] = {}
        self.free_s = dict.fromkeys(range(shards), 0.0)
        self.given = 0

    def start(self, name: str, shards: int | None = None) -> None:
        self.alive[name] = FairShare(shards or self.shards, self.now_s), set()

    def kill(self, name: str) -> None:
        for shard in self.alive.pop(name)[1]:
            self.free_s[shard] = self.now_s
        for share, _ in self.alive.values():
            share.forget(name, 1)

    def run(self, for_s: float) -> None:
        for _ in range(int(for_s / 0.25)):
            self.now_s += 0.25
            for name, (share, held) in self.alive.items():
                event = SchedulerPresent(
                    scheduler_id=name, incarnation=1, shards=share._shards, held=tuple(held)
                )
                for other, (theirs, _) in self.alive.items():
                    if other != name:
                        theirs.hear(event, self.now_s)
            for share, held in self.alive.values():
                for shard in share.give_back(held, self.now_s):
                    self.given += 1
                    held.discard(shard)
                    self.free_s[shard] = self.now_s
                for shard, since_s in list(self.free_s.items()):
                    patience_s = share.patience_s(shard, len(held), self.now_s, TTL_S)
                    if self.now_s - since_s >= patience_s and shard < share._shards:
                        held.add(shard)
                        del self.free_s[shard]

    def counts(self) -> list[int]:
        return sorted(len(held) for _, held in self.alive.values())


@given(
    shards=st.integers(2, 64),
    happenings=st.lists(st.sampled_from(("start", "kill")), max_size=8),
    count=st.integers(1, 5),
)
def test_shares_become_even_and_stay(shards: int, happenings: Sequence[str], count: int) -> None:
    world = Instances(shards)
    for number in range(count):
        world.start(f"scheduler-{number}")
    for number, what in enumerate(happenings):
        world.run(1.0)
        if what == "start" and len(world.alive) < 6:
            world.start(f"scheduler-{count + number}")
        elif what == "kill" and len(world.alive) > 1:
            world.kill(min(world.alive))
    world.run(60.0)
    counts, given_before = world.counts(), world.given
    assert sum(counts) == shards and not world.free_s
    assert counts[-1] - counts[0] < 2
    world.run(30.0)
    assert world.given == given_before, "shards still change hands"


def test_a_dead_ones_shards_are_taken_within_a_second() -> None:
    world = Instances(8)
    for name in ("scheduler-0", "scheduler-1"):
        world.start(name)
    world.run(10.0)
    assert world.counts() == [4, 4]
    world.kill("scheduler-1")
    world.run(1.0)
    assert world.counts() == [8]


def test_the_smaller_number_of_shards_stands_by_and_says_why() -> None:
    world = Instances(2)
    world.start("scheduler-0", 1)
    world.run(5.0)
    assert world.counts() == [1]
    world.start("scheduler-1", 2)
    world.run(10.0)
    share, held = world.alive["scheduler-0"]
    assert not held and len(world.alive["scheduler-1"][1]) == 2
    assert "scheduler-1 has scheduler.shards=2, this one 1: it stands by" in share.objection(world.now_s)


@given(counts=st.lists(st.integers(0, 64), min_size=2, max_size=6))
def test_only_the_fuller_give_back_and_never_below_the_emptiest(counts: list[int]) -> None:
    for at, mine in enumerate(counts):
        others = counts[:at] + counts[at + 1 :]
        left = mine - surplus(mine, others, sum(counts))
        assert left == mine or mine - min(others) >= 2
        assert left >= min(mine, *others), "it gave more than it had more"
