"""The cache with its real tiers and a real engine: restarts, and every fault a counted miss.

What a tier is credited with.
"""

import errno
import os
import time
from pathlib import Path

import pytest

from services.worker.engine.engine import TorchEngine
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.figures import CacheFigures, CacheMetrics, TierFigures, read_figures
from shared import metrics
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.prefix_rig import PrefixRig, make_engine
from tests.shared.messages.builders import ref, spec

FIRST = [(7 * at + 3) % VOCABULARY for at in range(33)]


OTHERS = [[(5 * at + shift) % VOCABULARY for at in range(33)] for shift in (11, 23, 37, 51)]


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return make_engine()


@pytest.fixture(scope="module")
def answer(engine: TorchEngine) -> list[list[int]]:
    return PrefixRig(engine, None).serve([FIRST])


def tiers_in(folder: Path, **more: object) -> PrefixCacheConfig:
    """Two prompts on the device, five on the host, the rest on disk."""
    return PrefixCacheConfig.model_validate(
        {"host_mb": 0, "host_blocks": 40, "disk_mb": 1, "disk_path": str(folder), "eviction": "lru", **more}
    )


def filled(engine: TorchEngine, folder: Path, **more: object) -> PrefixRig:
    """A worker whose disk has FIRST."""
    rig = PrefixRig(engine, tiers_in(folder, **more))
    for prompt in (FIRST, *OTHERS):
        rig.serve([prompt])
        rig.settle()
    return rig


def again(engine: TorchEngine, folder: Path, answer: list[list[int]]) -> PrefixRig:
    """The worker's next life; its answer is checked."""
    rig = PrefixRig(engine, tiers_in(folder))
    assert rig.serve([FIRST]) == answer
    rig.check_integrity()
    return rig


def found(rig: PrefixRig) -> tuple[int, ...]:
    return tuple(sum(hit.blocks[tier] for hit in rig.hits) for tier in Tier)


def test_a_restart_reuses_the_disk(engine: TorchEngine, tmp_path: Path, answer: list[list[int]]) -> None:
    filled(engine, tmp_path).close()
    rig = again(engine, tmp_path, answer)
    device, host, disk = found(rig)
    assert device == 0 and host + disk == 8  # some may have been read ahead by then
    assert rig.prefilled_tokens == 1
    rig.close()


def test_another_models_file_is_not_read(
    engine: TorchEngine, tmp_path: Path, answer: list[list[int]]
) -> None:
    filled(make_engine(architecture="qwen3"), tmp_path).close()
    rig = again(engine, tmp_path, answer)
    assert found(rig) == (0, 0, 0) and rig.store is not None and rig.store.disk is not None
    assert rig.store.disk.counts["reinitialised"] == 1
    rig.close()


def test_a_torn_file_is_a_miss(engine: TorchEngine, tmp_path: Path, answer: list[list[int]]) -> None:
    filled(engine, tmp_path).close()
    (path,) = tmp_path.glob("*.kv")
    os.truncate(path, path.stat().st_size // 200)
    again(engine, tmp_path, answer).close()


def test_flipped_bytes_are_counted_misses(
    engine: TorchEngine, tmp_path: Path, answer: list[list[int]]
) -> None:
    rig = filled(engine, tmp_path)
    assert rig.store is not None and rig.store.disk is not None
    geometry = rig.store.disk.geometry
    rig.close()
    (path,) = tmp_path.glob("*.kv")
    data = bytearray(path.read_bytes())
    for place in range(geometry.slots):
        data[geometry.record_at(place) + 5] ^= 1
    path.write_bytes(data)
    rig = again(engine, tmp_path, answer)
    assert rig.store is not None and found(rig) == (0, 0, 0)
    disk = read_figures(rig.store).tiers[Tier.DISK]
    assert disk.checksum_failures == disk.faults >= 1 and disk.hits == 0
    rig.close()


def test_a_full_disk_leaves_the_other_tiers(
    engine: TorchEngine, tmp_path: Path, answer: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    rig = filled(engine, tmp_path)
    assert rig.store is not None and rig.store.disk is None
    assert rig.serve([FIRST]) == answer
    assert found(rig)[Tier.HOST] == 8
    rig.close()


def test_a_disk_that_is_slower_than_computing_is_left_alone_and_that_is_shown(
    engine: TorchEngine, tmp_path: Path, answer: list[list[int]]
) -> None:
    filled(engine, tmp_path).close()
    rig = PrefixRig(engine, tiers_in(tmp_path, disk_bytes_per_s=20_000))
    assert rig.store is not None
    rig.serve([OTHERS[0][::-1]], chunk=40)
    assert rig.serve([FIRST], chunk=40) == answer, "tried, and given up"
    figures = read_figures(rig.store)
    assert not figures.tiers[Tier.DISK].in_use and figures.loads_abandoned >= 1
    assert figures.tiers[Tier.DISK].helped_s < 0
    spent_s = figures.tiers[Tier.DISK].spent_s
    rig.serve([OTHERS[0]], chunk=40)
    figures = read_figures(rig.store)
    assert figures.tiers[Tier.DISK].spent_s == spent_s, "not tried any more"
    assert figures.tiers[Tier.DISK].refused >= 8
    CacheMetrics().show(figures)
    assert b'kvasir_worker_prefix_tier_in_use{tier="disk"} 0.0' in metrics.render()
    rig.close()


def test_what_starts_soon_is_read_ahead(engine: TorchEngine, tmp_path: Path) -> None:
    filled(engine, tmp_path).close()
    rig = PrefixRig(engine, tiers_in(tmp_path))
    assert rig.prefixes is not None and rig.store is not None
    rig.prefixes.expect([spec(ref("soon"), FIRST)])
    for _ in range(8):
        rig.settle()
    rig.serve([FIRST])
    assert found(rig) == (0, 8, 0) and read_figures(rig.store).prefetched == 8
    rig.close()


def test_a_clean_stop_writes_what_is_only_in_memory_within_its_time(
    engine: TorchEngine, tmp_path: Path, answer: list[list[int]]
) -> None:
    rig = PrefixRig(engine, tiers_in(tmp_path))
    rig.serve([FIRST])
    assert rig.store is not None and rig.store.close(20.0, flush_s=20.0)
    rig = again(engine, tmp_path, answer)
    assert sum(found(rig)) == 8 and rig.prefilled_tokens == 1
    rig.close()


def test_a_disk_too_slow_for_the_time_there_is_gets_a_beginning_or_nothing(
    engine: TorchEngine, tmp_path: Path, answer: list[list[int]]
) -> None:
    rig = PrefixRig(engine, tiers_in(tmp_path, disk_bytes_per_s=20_000))
    rig.serve([FIRST])
    began_s = time.monotonic()
    assert rig.store is not None and rig.store.close(20.0, flush_s=0.3)
    assert time.monotonic() - began_s < 5
    rig = again(engine, tmp_path, answer)
    assert sum(found(rig)) < 8
    rig.close()


def test_a_tier_helped_by_what_it_saved_less_what_it_took() -> None:
    tier = TierFigures("host", 3, 1, 0, 0, 0, 300, saved_s=2.0, spent_s=0.5, in_use=True)
    assert tier.helped_s == 1.5
    details = CacheFigures(
        (tier,), misses=4, loads_abandoned=0, lost_unsaved=0, prefetched=2, kept_blocks=3
    ).details()
    assert details["prefix_misses"] == 4 and details["prefix_tiers"][0]["hits"] == 3


def test_hits_and_misses_are_counted_in_blocks() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig(host_mb=0))
    rig.serve([list(range(25))], chunk=40)
    rig.serve([list(range(25))], chunk=40)
    assert rig.store is not None
    figures = read_figures(rig.store)
    assert (figures.tiers[0].hits, figures.misses) == (6, 6)
    assert figures.tiers[0].helped_s > 0 and figures.tiers[0].loaded_bytes == 0
    rig.close()
