"""Copies behind the sequences' backs: what a stop leaves on disk, and the tier in others' host memory."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import StoredBlock
from services.worker.kv.tiers.host import PeerTier
from services.worker.kv.tiers.records import CRC, RecordRow
from tests.services.worker.kv.rig import BLOCK_TOKENS, Rig, names_of, tokens_of


def prompt(number: int, blocks: int = 4) -> bytes:
    """So many blocks; prompts of one number share their beginnings, others nothing."""
    return tokens_of(*[number] * BLOCK_TOKENS * blocks)


def flush(rig: Rig, most: int = 1000) -> tuple[int, int]:
    done: list[StoredBlock] = []

    def write(node: StoredBlock, tier: Tier, source: int) -> bool:
        assert tier is not Tier.DEVICE or source < rig.pool.ids, "its bytes are another worker's"
        assert (rig.mover.device if tier is Tier.DEVICE else rig.mover.host)[source] == node.name
        rig.mover.disk[node.place] = node
        done.append(node)
        return True

    return rig.cache.flush(write, lambda: len(done) < most)


def restored(rig: Rig) -> Rig:
    """The next life: the disk as the last one left it."""
    places = [node.places[Tier.DISK] for node in rig.cache._books.tree]
    again = Rig(16, 4, rig.cache._books.disk.total, "lru")
    again.mover.disk = {place: rig.mover.disk[place] for place in places if place is not None}
    kept = len(again.mover.disk)
    assert again.cache.restore(again.mover.disk.values()) == kept, "all that is on disk can be found again"
    return again


def found(rig: Rig, number: int) -> int:
    return len(rig.acquire(names_of(prompt(number)), 4).blocks)


def test_what_was_wanted_last_is_found_again() -> None:
    rig = Rig(16, 4, 8, "lru")
    rig.serve(prompt(0), prompt(1), prompt(2))
    assert flush(rig) == (8, 0)
    again = restored(rig)
    assert [found(again, number) for number in (2, 1, 0)] == [4, 4, 0]


def test_what_is_on_disk_and_colder_makes_room() -> None:
    rig = Rig(16, 4, 4, "lru")
    rig.serve(prompt(0))
    assert flush(rig) == (4, 0)
    rig.serve(prompt(1, 3))
    assert flush(rig) == (3, 0)
    again = restored(rig)
    assert [found(again, number) for number in (1, 0)] == [3, 1]


def test_what_lies_at_a_creditor_is_left_there() -> None:
    """A worker that had borrowed ended with an error instead of a flush."""
    rig = Rig(4, 0, 8, "lru")
    rig.borrow(3)
    rig.serve(prompt(0, 7))
    assert rig.cache.idle_borrowed_blocks == 3
    assert flush(rig) == (4, 0)
    assert found(restored(rig), 0) == 4


def test_ended_early_it_leaves_the_beginnings_of_what_is_wanted_most() -> None:
    rig = Rig(16, 4, 8, "lru")
    rig.serve(prompt(0), prompt(1))
    assert flush(rig, most=3) == (3, 5)
    assert found(restored(rig), 1) == 3


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=20),
    st.integers(1, 12),
    st.integers(0, 9),
)
@settings(max_examples=150)
def test_whatever_was_served_the_books_balance_and_all_that_is_left_can_be_found(
    served: list[tuple[int, int]], disk_blocks: int, most: int
) -> None:
    rig = Rig(6, 4, disk_blocks, "lru")
    rig.serve(*(prompt(number, length) for number, length in served))
    kept = list(rig.cache._worth_keeping())
    assert len(kept) <= disk_blocks
    assert all(node.parent is None or node.parent in kept[:at] for at, node in enumerate(kept))
    flush(rig, most)
    rig.cache.check_integrity([])
    restored(rig)


FIRST, SECOND, THIRD = (tokens_of(*range(at, at + 8)) for at in (10, 20, 30))
"""Four blocks each: all that the device holds, and all that the host does."""


@pytest.fixture
def rig() -> Rig:
    return Rig(4, 4, 0, "lru", peers=8)


def full(rig: Rig) -> Rig:
    """The first prompt is on the host alone, the second on the device."""
    rig.serve(FIRST, SECOND)
    return rig


def sent(rig: Rig, blocks: int = 4) -> Rig:
    """So much of the first is at a peer, and nothing of it anywhere else."""
    full(rig).lend(blocks)
    assert rig.cache.peers.start(9) == min(3, blocks)  # copies that may be open at a time
    rig.end_sends(ok=True)
    rig.cache.peers.start(9)
    rig.end_sends(ok=True)
    rig.serve(THIRD)
    return rig


def test_what_left_the_host_is_found_at_the_peer(rig: Rig) -> None:
    sent(rig)
    hit = rig.acquire(names_of(FIRST), 4)
    assert (len(hit.blocks), hit.loaded) == (4, (0, 0, 0))
    assert rig.cache.counts["hits_peer"] == 4
    report = rig.cache.report()
    assert (report.peer_blocks, report.peer_used_blocks, report.peer_hits, report.peer_written) == (4,) * 4
    assert report.host_written >= 4  # It went to the peer from there.
    rig.cache.release(hit.blocks)
    rig.check()


def test_a_lost_creditor_is_a_miss(rig: Rig) -> None:
    sent(rig).lose_peers(0, 4)
    assert rig.acquire(names_of(FIRST), 4).blocks == ()
    assert rig.cache.counts["lost_peer"] == 4
    assert rig.cache.peers.slots.total == 0
    rig.check()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_copy_that_fails_leaves_nothing_behind(rig: Rig, is_dead: bool) -> None:
    """Or whose creditor dies meanwhile: its blocks are on the host, and go to another one."""
    rig.serve(FIRST)
    assert rig.cache.peers.wanted_blocks() == 0, "the host is not full"
    full(rig)
    assert rig.cache.peers.start(4) == 0, "nobody has lent anything"
    rig.lend(4)
    assert rig.cache.peers.start(2) == 2
    if is_dead:
        rig.lose_peers(0, 4)
    rig.end_sends(ok=is_dead)
    assert (rig.cache.peers.slots.used, rig.cache.peers.slots.total) == (0, 0 if is_dead else 4)
    if is_dead:
        assert rig.cache.peers.wanted_blocks() == 4
    else:
        assert rig.cache.counts["write_failures_peer"] == 2
    rig.check()


def test_old_blocks_give_way_once_nobody_lends_more(rig: Rig) -> None:
    full(rig).lend(2)
    rig.cache.peers.start(2)
    rig.end_sends(ok=True)
    assert rig.cache.peers.start(4) == 0, "more may come yet"
    rig.cache.peers.searched(found=False)
    assert rig.cache.peers.start(1) == 1
    rig.end_sends(ok=True)
    assert rig.cache.counts["evicted_peer"] == 1
    assert rig.cache.peers.slots.total == 2
    rig.check()


def test_a_tier_slower_than_computing_is_neither_filled_nor_enlarged(rig: Rig) -> None:
    full(rig).lend(2)
    rig.cache.gate.profile(Tier.PEER, 0.01)
    rig.cache.gate.on_prefilled(10, 0.05)
    assert rig.cache.peers.wanted_blocks() == rig.cache.peers.start(4) == 0


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_tier_that_was_slow_once_is_timed_again_when_nothing_is_lent(rig: Rig, is_dead: bool) -> None:
    """All of it was returned, or its creditor died."""
    full(rig).cache.gate.on_prefilled(10, 0.05)
    rig.cache.peers.admit(range(2), 0.01)
    rig.cache.peers.lose([0, 1]) if is_dead else rig.cache.peers.retire()
    assert rig.cache.peers.wanted_blocks() > 0
    rig.cache.peers.admit(range(2, 4), 0.001)
    assert rig.cache.peers.start(2) == 2


def test_a_link_is_as_fast_as_it_was_timed_until_a_block_came_over_it(rig: Rig) -> None:
    rig.cache.peers.admit(range(2), 0.01)
    assert rig.cache.gate.block_s(Tier.PEER) == 0.01
    rig.cache.gate.on_loaded(Tier.PEER, 1, 0.002)
    rig.cache.peers.admit(range(2, 4), 0.05)
    assert rig.cache.gate.block_s(Tier.PEER) < 0.01


def test_only_what_nothing_is_in_is_returned_and_nothing_while_more_is_wanted() -> None:
    rig = full(Rig(4, 4, 0, "lru", peers=8))
    rig.cache.peers.admit(range(2))
    assert rig.cache.peers.retire() == [], "more is wanted"
    rig.cache.peers.admit(range(2, 6))
    rig.cache.peers.start(3)
    rig.end_sends(ok=True)
    assert rig.cache.peers.retire() == [3, 4, 5]
    assert rig.cache.peers.slots.total == rig.cache.peers.slots.used == 3
    rig.check()


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_slots_are_conserved_whatever_peers_do(dice: random.Random) -> None:
    """Many short prompts of two tokens in a small cache: peers lend and die at any time."""
    rig = Rig(dice.randint(2, 8), dice.randint(1, 4), dice.choice((0, 4)), "lru", peers=dice.randint(1, 8))

    def prompt() -> bytes:
        return tokens_of(*(dice.randint(0, 1) for _ in range(dice.randint(2, 10))))

    for _ in range(100):
        act = dice.choice(("run", "run", "begin", "go on", "end", "end", "settle", "lend", "send", "lose"))
        if act == "run":
            rig.run(prompt())
        elif act == "begin":
            rig.begin(prompt())
        elif act == "go on":
            rig.go_on(dice.randint(0, 5))
        elif act == "end":
            rig.end(dice.randint(0, 5))
        elif act == "settle":
            rig.settle(ok=dice.random() < 0.9)
        elif act == "lend":
            rig.lend(dice.randint(0, 4))
        elif act == "send":
            rig.cache.peers.start(dice.randint(1, 4))
        elif act == "lose" and dice.random() < 0.3:
            rig.lose_peers(dice.randint(0, 20), 2)
        assert rig.cache.peers.slots.total <= rig.cache.peers.slots.most
        rig.check()
    while rig.waiting:
        rig.go_on(0)
    rig.settle(ok=True)
    rig.check()


NAME, OTHER, FINGERPRINT = b"n" * 16, b"o" * 16, b"f" * 16
BYTES = 64


@dataclass
class Memory:
    """Of a creditor that is well, or not."""

    rows: dict[int, RecordRow] = field(default_factory=dict)
    is_well: bool = True

    def read(self, place: int, row: RecordRow) -> bool:
        if self.is_well:
            row[:] = self.rows[place]
        return self.is_well

    def write(self, place: int, row: RecordRow) -> bool:
        if self.is_well:
            self.rows[place] = row.copy()
        return self.is_well


@pytest.fixture
def tier() -> PeerTier:
    made = PeerTier(FINGERPRINT)
    made.memory = Memory()
    return made


def row_of(seed: int) -> RecordRow:
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


def write(tier: PeerTier, place: int, row: RecordRow) -> bool:
    return tier.write(StoredBlock(NAME, b"", 0, place), row, CRC.of(row, NAME, FINGERPRINT))


def read(tier: PeerTier, place: int, name: bytes = NAME) -> RecordRow | None:
    row = np.zeros(BYTES, dtype=np.uint8)
    return row if tier.read(place, name, row) else None


def test_bytes_of_another_block_are_a_miss(tier: PeerTier) -> None:
    """Also where a creditor mixed up its slots: what comes is whole, and not what was asked for."""
    write(tier, 3, row_of(1))
    assert read(tier, 3, OTHER) is None
    assert isinstance(tier.memory, Memory)
    tier.memory.rows[3] = row_of(2)
    assert read(tier, 3) is None
    assert tier.counts == {"read_errors": 1, "checksum_failures": 1}


def test_a_slot_that_was_lost_or_never_filled_is_a_miss(tier: PeerTier) -> None:
    write(tier, 3, row_of(1))
    tier.forget([3])
    assert read(tier, 3) is None
    assert read(tier, 4) is None
    assert tier.counts == {"read_errors": 2}


def test_a_write_that_failed_leaves_nothing_that_could_be_read(tier: PeerTier) -> None:
    write(tier, 3, row_of(1))
    assert isinstance(tier.memory, Memory)
    tier.memory.is_well = False
    assert not write(tier, 3, row_of(2))
    tier.memory.is_well = True
    assert read(tier, 3) is None
    assert tier.counts == {"write_errors": 1, "read_errors": 1}
