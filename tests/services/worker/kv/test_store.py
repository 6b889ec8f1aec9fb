"""The cache with its real tiers and a real engine: restarts, every fault a counted miss, and its figures."""

import time
from pathlib import Path

import pytest

from services.worker.engine.engine import TorchEngine
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.figures import CacheMetrics, read_figures
from shared import metrics
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.kv.rig import flip_byte
from tests.services.worker.prefix_rig import PrefixRig, make_engine
from tests.shared.messages.builders import ref, spec

FIRST = [(7 * at + 3) % VOCABULARY for at in range(33)]
OTHERS = [[(5 * at + shift) % VOCABULARY for at in range(33)] for shift in (11, 23, 37, 51)]


class Life(PrefixRig):
    """A worker that holds two prompts on the device and five on the host; the rest is on disk."""

    def __init__(self, engine: TorchEngine, folder: Path, **more: object) -> None:
        tiers = {"disk_mb": 1, "disk_path": str(folder), "eviction": "lru"}
        super().__init__(engine, PrefixCacheConfig.model_validate(tiers | more), host_blocks=40)
        assert self.store is not None
        self.kv = self.store

    def found(self) -> tuple[int, ...]:
        """Blocks of hits, by tier."""
        tiers = Tier.DEVICE, Tier.HOST, Tier.DISK
        return tuple(sum(hit.blocks[tier] for hit in self.hits) for tier in tiers)


class Lives:
    """One worker's, one after the other on one disk."""

    def __init__(self, engine: TorchEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.answer = PrefixRig(engine, None).serve([FIRST])

    def first(self) -> Life:
        """Its disk has FIRST."""
        life = Life(self.engine, self.folder)
        for prompt in (FIRST, *OTHERS):
            life.serve([prompt])
            life.settle()
        return life

    def next(self) -> Life:
        """One that was asked for FIRST, and said the right thing."""
        life = Life(self.engine, self.folder)
        assert life.serve([FIRST]) == self.answer
        life.check_integrity()
        return life


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(make_engine(), tmp_path)


def test_a_restart_reuses_the_disk(lives: Lives) -> None:
    lives.first().close()
    life = lives.next()
    device, host, disk = life.found()
    assert device == 0 and host + disk == 8  # some may have been read ahead by then
    assert life.prefilled_tokens == 1
    life.close()


def test_what_was_forgotten_does_not_come_back_with_a_restart(lives: Lives) -> None:
    life = lives.first()
    assert life.kv.forget_unused() >= 40
    life.check_integrity()
    assert life.serve([FIRST]) == lives.answer and life.found() == (0, 0, 0)
    life.kv.forget_unused()
    life.close()
    assert lives.next().found() == (0, 0, 0)


def test_flipped_bytes_are_counted_misses(lives: Lives) -> None:
    life = lives.first()
    assert life.kv.disk is not None
    geometry = life.kv.disk.geometry
    life.close()
    (path,) = lives.folder.glob("*.kv")
    for place in range(geometry.slots):
        flip_byte(path, geometry.record_at(place) + 5)
    life = lives.next()
    assert life.found() == (0, 0, 0)
    disk = read_figures(life.kv).tiers[Tier.DISK]
    assert disk["checksum_failures"] == disk["faults"] >= 1 and disk["hits"] == 0
    life.close()


def test_a_disk_that_is_slower_than_computing_is_left_alone_and_that_is_shown(lives: Lives) -> None:
    lives.first().close()
    life = Life(lives.engine, lives.folder, disk_bytes_per_s=20_000)
    life.serve([OTHERS[0][::-1]], chunk=40)
    assert life.serve([FIRST], chunk=40) == lives.answer, "tried, and given up"
    figures = read_figures(life.kv)
    assert not figures.tiers[Tier.DISK]["in_use"] and figures.overall["loads_abandoned"] >= 1
    assert figures.tiers[Tier.DISK]["helped_s"] < 0
    spent_s = figures.tiers[Tier.DISK]["spent_s"]
    life.serve([OTHERS[0]], chunk=40)
    figures = read_figures(life.kv)
    assert figures.tiers[Tier.DISK]["spent_s"] == spent_s, "not tried any more"
    assert figures.tiers[Tier.DISK]["refused"] >= 8
    CacheMetrics().show(figures)
    assert b'kvasir_worker_prefix_tier_in_use{tier="disk"} 0.0' in metrics.render()
    life.close()


def test_what_starts_soon_is_read_ahead(lives: Lives) -> None:
    lives.first().close()
    life = Life(lives.engine, lives.folder)
    assert life.prefixes is not None
    life.prefixes.expect([spec(ref("soon"), FIRST)])
    for _ in range(8):
        life.settle()
    life.serve([FIRST])
    assert life.found() == (0, 8, 0) and read_figures(life.kv).overall["prefetched"] == 8
    life.close()


def test_a_clean_stop_writes_what_is_only_in_memory_within_its_time(lives: Lives) -> None:
    life = Life(lives.engine, lives.folder)
    life.serve([FIRST])
    assert life.kv.close(20.0, flush_s=20.0)
    life = lives.next()
    assert sum(life.found()) == 8 and life.prefilled_tokens == 1
    life.close()


def test_a_disk_too_slow_for_the_time_there_is_gets_a_beginning_or_nothing(lives: Lives) -> None:
    life = Life(lives.engine, lives.folder, disk_bytes_per_s=20_000)
    life.serve([FIRST])
    began_s = time.monotonic()
    assert life.kv.close(20.0, flush_s=0.3)
    assert time.monotonic() - began_s < 5
    life = lives.next()
    assert sum(life.found()) < 8
    life.close()


def test_hits_and_misses_are_counted_in_blocks() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig())
    rig.serve([list(range(25))], chunk=40)
    rig.serve([list(range(25))], chunk=40)
    assert rig.store is not None
    figures = read_figures(rig.store)
    device, details = figures.tiers[Tier.DEVICE], figures.details()
    assert (device["hits"], details["prefix_misses"]) == (6, 6)
    assert device["helped_s"] > 0 and device["loaded_bytes"] == 0
    assert details["prefix_tiers"][0]["hits"] == 6
    rig.close()
