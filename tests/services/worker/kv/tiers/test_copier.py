"""The cache over real memory and a real file, both damaged: no hit holds wrong bytes, a slow tier is left."""

import mmap
import platform
import re
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Store, StoredBlock
from services.worker.kv.tiers.copier import TierMover
from services.worker.kv.tiers.disk import Geometry, open_disk
from services.worker.kv.tiers.host import HostTier, PeerTier
from services.worker.kv.tiers.records import CRC, RecordRow, Records, records_of
from services.worker.kv.transfers import TransferEngine
from shared.blocks import BlockHash, chain, root
from tests.services.worker.kv.rig import flip_byte

FINGERPRINT = b"model 0123456789"
NAMES = chain(root(FINGERPRINT), bytes(4 * 2 * 8), 2)
WAIT_S = 20.0


@dataclass
class LentRows:
    """A creditor's memory, at the end of a link that takes a while."""

    rows: dict[int, RecordRow] = field(default_factory=dict)
    read_s: float = 0.0

    def read(self, place: int, row: RecordRow) -> bool:
        sleep(self.read_s)
        row[:] = self.rows[place]
        return True

    def write(self, place: int, row: RecordRow) -> bool:
        self.rows[place] = row.copy()
        return True


class Machine:
    """Pools of a two-layer engine, a mover and a cache on top of them."""

    def __init__(
        self,
        path: Path,
        *,
        device: int = 4,
        host: int = 4,
        disk: int = 8,
        peers: int = 0,
        bytes_per_s: Mapping[Tier, float] | None = None,
    ) -> None:
        shape = (device, 1, 4, 8)
        self.records = Records([(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)])
        self.host = HostTier(host, self.records.record_bytes, FINGERPRINT)
        self.geometry = Geometry(FINGERPRINT, self.records.record_bytes, disk)
        self.disk = open_disk(path, self.geometry)
        assert self.disk is not None
        self.peers, self.lent = PeerTier(FINGERPRINT), LentRows()
        self.peers.memory = self.lent
        self._woken = threading.Semaphore(0)
        self.written: list[bool] = []
        """How writes to disk ended that nobody but the test asked for."""
        self.transfers = TransferEngine(self._woken.release, most_open=8)
        self.mover = TierMover(self.transfers, self.records, self.host, self.disk, bytes_per_s, self.peers)
        tiers = Tiers(host, disk, "lru", peer_blocks=peers)
        self.cache = PrefixCache(BlockPool(device, 2), tiers, self.mover, CostGate())
        self.restored = self.cache.restore(self.disk.stored())

    def wait(self) -> None:
        """Until a copy is over, and the cache knows."""
        assert self._woken.acquire(timeout=WAIT_S)
        self.transfers.settle()

    def start_write(self, node: StoredBlock) -> bool:
        return self.mover.start_write(Tier.DISK, 0, node, self.written.append)

    def fill(self, block: int, name: BlockHash) -> None:
        self.records.write([self.bytes_of(name)], [block])

    def bytes_of(self, name: BlockHash) -> RecordRow:
        seed = int.from_bytes(name, "little")
        return np.random.default_rng(seed).integers(0, 256, self.records.record_bytes, dtype=np.uint8)

    def holds(self, block: int, name: BlockHash) -> bool:
        found = np.zeros(self.records.record_bytes, dtype=np.uint8)
        self.records.read([block], [found])
        return np.array_equal(found, self.bytes_of(name))

    def run(self, names: list[BlockHash]) -> tuple[int, ...]:
        """A sequence from beginning to end; where its hits came from."""
        hit = self.cache.acquire(names, len(names))
        blocks, tiers = list(hit.blocks), tuple(hit.loaded)
        if hit.awaited is not None:
            while not hit.awaited.is_over:
                self.wait()
            came = self.cache.collect(hit.awaited)
            blocks += came.blocks
            tiers = tuple(map(sum, zip(tiers, came.loaded, strict=True)))
        for block, name in zip(blocks, names, strict=False):
            assert self.holds(block, name), "a hit holds other bytes"
        found = len(blocks)
        blocks += self.cache.allocate(len(names) - found)
        for index in range(found, len(names)):
            self.fill(blocks[index], names[index])
            self.cache.publish(blocks[index], names[index], names[index - 1] if index else None)
        self.cache.release(blocks)
        return tiers

    def settle(self) -> None:
        """Wait for every copy in flight, and tell the cache."""
        while self.transfers.open_copies:
            self.wait()
        self.transfers.settle()

    def close(self) -> None:
        assert self.transfers.halt(WAIT_S)
        self.mover.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "kv")
    yield made
    made.close()


def prompt(number: int) -> list[BlockHash]:
    return chain(root(FINGERPRINT), number.to_bytes(4, "little") * 6, 2)


STEP = st.one_of(
    st.tuples(st.sampled_from(["run", "prefetch"]), st.integers(0, 5), st.integers(1, 3)),
    st.tuples(st.just("save"), st.just(0), st.integers(1, 4)),
    st.tuples(st.sampled_from(["spoil host", "spoil disk", "restart"]), st.integers(0, 7), st.just(0)),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEP, max_size=25))
def test_no_run_serves_a_block_whose_bytes_were_damaged(
    tmp_path: Path, steps: list[tuple[str, int, int]]
) -> None:
    path = tmp_path / "kv"
    path.unlink(missing_ok=True)
    machine = Machine(path)
    for kind, which, count in steps:
        if kind == "run":
            machine.run(prompt(which)[:count])
        elif kind == "prefetch":
            machine.cache.prefetch(prompt(which), count)
            machine.settle()
        elif kind == "save":
            machine.cache.writes.start(count)
            machine.settle()
        elif kind == "spoil host":
            machine.host.row(which % 4)[3] ^= 1
        elif kind == "spoil disk":
            flip_byte(path, machine.geometry.record_at(which) + 17)
        else:
            machine.close()
            machine = Machine(path)
        machine.cache.check_integrity([])
    machine.close()


def test_a_damaged_copy_on_the_host_is_a_counted_miss(machine: Machine) -> None:
    machine.run(prompt(0)[:3])
    machine.run(prompt(1)[:3])
    for place in range(4):
        machine.host.row(place)[0] ^= 0xFF
    assert machine.run(prompt(0)[:3])[Tier.HOST] == 0
    assert machine.host.counts["checksum_failures"] == 1
    assert machine.cache.counts["copies_lost"] == 1


def _stored(machine: Machine, count: int) -> list[Load]:
    """So many blocks on the host, loads of them to the device."""
    for place in range(count):
        machine.fill(place, NAMES[place])
    stores = [Store(NAMES[place], place, place) for place in range(count)]
    assert machine.mover.store(stores) > 0
    for place in range(count):
        machine.fill(place, NAMES[-1])
    return [Load(NAMES[place], Tier.HOST, place, place) for place in range(count)]


def test_of_two_stores_to_one_slot_the_last_counts(machine: Machine) -> None:
    machine.fill(0, NAMES[0])
    machine.fill(1, NAMES[1])
    machine.mover.store([Store(NAMES[0], 0, 2), Store(NAMES[1], 1, 2)])
    assert machine.mover.load([Load(NAMES[0], Tier.HOST, 2, 3)], 1.0).failed
    assert machine.mover.load([Load(NAMES[1], Tier.HOST, 2, 3)], 1.0).done == 1
    assert machine.holds(3, NAMES[1])


def test_loads_end_at_the_first_that_is_not_intact(machine: Machine) -> None:
    loads = _stored(machine, 4)
    machine.host.row(2)[5] ^= 2
    loaded = machine.mover.load(loads, 5.0)
    assert (loaded.done, loaded.failed) == (2, True)
    assert loaded.elapsed_s[Tier.HOST] > 0 == loaded.elapsed_s[Tier.DISK]
    assert [machine.holds(block, NAMES[block]) for block in range(4)] == [True, True, False, False]


def at_peers(machine: Machine) -> Machine:
    """Five prompts of three blocks, most of which fit nowhere else."""
    machine.cache.peers.admit(range(16))
    for number in range(5):
        machine.run(prompt(number)[:3])
        while machine.cache.peers.start(8):
            machine.settle()
    return machine


def test_what_peers_have_comes_to_the_device_verified(tmp_path: Path) -> None:
    machine = at_peers(Machine(tmp_path / "kv", peers=16))
    machine.run(prompt(1)[:3])
    assert machine.cache.counts["hits_peer"] > 0
    assert machine.cache.gate.block_s(Tier.PEER) > 0
    for row in machine.lent.rows.values():
        row[9] ^= 4
    before = machine.cache.counts["hits_peer"]
    for number in (2, 0, 3, 1):
        machine.run(prompt(number)[:3])
        machine.cache.check_integrity([])
    assert machine.cache.counts["hits_peer"] == before
    assert machine.peers.counts["checksum_failures"] > 0
    machine.close()


def test_a_slot_that_is_reused_while_it_waits_to_be_written_is_not_written(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "kv", bytes_per_s={Tier.DISK: 5_000})
    _stored(machine, 1)
    assert machine.start_write(StoredBlock(NAMES[0], b"", 0, 0))
    machine.fill(1, NAMES[1])
    machine.mover.store([Store(NAMES[1], 1, 0)])
    machine.settle()
    assert machine.written == [False]
    machine.close()


def test_an_io_thread_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "kv", bytes_per_s={Tier.DISK: 1_000})
    _stored(machine, 1)
    machine.start_write(StoredBlock(NAMES[0], b"", 0, 0))
    threading.Event().wait(0.05)  # the thread has begun
    assert not machine.transfers.halt(0.05)
    machine.close()


def pools(
    dtype: torch.dtype, device: str = "cpu", blocks: int = 6
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two layers of different shape, filled at random."""
    shapes = (((blocks, 2, 4, 8), (blocks, 2, 8, 3)), ((blocks, 1, 6, 8), (blocks, 1, 8, 6)))
    return [
        (torch.randn(key).to(device, dtype), torch.randn(value).to(device, dtype)) for key, value in shapes
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_back_as_they_were(dtype: torch.dtype, device: str) -> None:
    """Blocks 1, 4, 2 to records and into blocks 5, 0, 3; the others stay."""
    made = pools(dtype, device)
    before = [(key.clone(), value.clone()) for key, value in made]
    records = records_of(made)
    rows = np.zeros((3, records.record_bytes), dtype=np.uint8)
    records.read([1, 4, 2], list(rows))
    records.write(list(rows), [5, 0, 3])
    for layer, old in zip(made, before, strict=True):
        for pool, was in zip(layer, old, strict=True):
            assert torch.equal(pool, was[[4, 1, 2, 2, 4, 1]])


@pytest.mark.gpu
def test_what_is_first_read_in_a_step_is_read_outside_of_one_too() -> None:
    """In a step all new tensors are for inference only, and nobody may write to those outside of one."""
    made = pools(torch.float32, "cuda")
    records = records_of(made)
    rows = np.zeros((2, records.record_bytes), dtype=np.uint8)
    with torch.inference_mode():
        records.read([0, 1], list(rows))
    records.read([1, 0], list(rows))
    records.write(list(rows), [0, 1])


def test_pools_that_cannot_be_taken_as_rows_are_refused() -> None:
    key, value = torch.zeros(4, 1, 8, 2), torch.zeros(4, 1, 2, 8)
    with pytest.raises(ValueError, match="contiguous"):
        Records([(key.transpose(2, 3), value)])
    with pytest.raises(ValueError, match="number of blocks"):
        Records([(key, value[:3])])


ROW = np.arange(256, dtype=np.uint8)


def test_it_depends_on_bytes_name_and_fingerprint() -> None:
    of = [(ROW, b"name", b"model"), (ROW, b"eman", b"model"), (ROW, b"name", b"other")]
    sums = {CRC.of(*one) for one in [*of, (ROW[::-1].copy(), b"name", b"model")]}
    assert len(sums) == 4 and CRC.of(ROW.copy(), b"name", b"model") in sums


@pytest.mark.skipif(
    sys.platform != "linux" or [int(each) for each in re.findall(r"\d+", platform.release())[:2]] < [5, 14],
    reason="needs MADV_POPULATE_WRITE",
)
def test_the_system_has_given_the_memory_that_is_ready() -> None:
    """Bringing blocks there takes no page fault then, which would cost more than the copy."""
    blocks, elements = 64, 16_384
    memory = [mmap.mmap(-1, blocks * elements * 4, flags=mmap.MAP_PRIVATE) for _ in range(4)]
    tensors = [torch.frombuffer(each, dtype=torch.float32).view(blocks, 1, 1, elements) for each in memory]
    records = Records([(tensors[0], tensors[1]), (tensors[2], tensors[3])])

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    def bring(first: int) -> int:
        before = faults()
        records.write([row] * (blocks // 2), range(first, first + blocks // 2))
        return faults() - before

    row = np.ones(records.record_bytes, dtype=np.uint8)
    records.write([row], [3])
    records.make_ready(blocks // 2)
    assert all(tensor[3].all() and not tensor[4:].any() for tensor in tensors)
    ready, fresh = bring(0), bring(blocks // 2)
    assert ready < fresh / 4, (ready, fresh)
    records.give_back()
    assert not any(tensor.any() for tensor in tensors) and bring(0) >= fresh
