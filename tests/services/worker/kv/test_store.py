"""The cache with its real tiers and a real engine: restarts, faults, figures, and audits of its hits."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core.settings import PrefixCacheConfig
from services.worker.engine.engine import TorchEngine
from services.worker.engine.native import library
from services.worker.kv.audit import SampledAudit
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.figures import CacheMetrics, read_figures
from services.worker.kv.tiers.records import Records
from shared import metrics
from shared.messages.sequence import FinishReason
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.prefix_rig import BLOCK_TOKENS, PrefixRig, make_engine
from tests.shared.messages.builders import plan, prefill, ref, spec

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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory stays")
def test_an_opened_store_has_given_back_what_timing_its_copies_touched() -> None:
    engine = make_engine(blocks=4096)
    parts = [part for pool in engine.pools for part in pool]
    for part in parts:
        part.fill_(1.0)
    PrefixRig(engine, PrefixCacheConfig(), host_blocks=8)
    assert sum(int(part.count_nonzero()) for part in parts) < 0.05 * sum(part.numel() for part in parts)


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


AUDITS = PrefixCacheConfig(audit_rate=1.0)
PROMPT = [(7 * at) % 90 + 1 for at in range(18)]
WHOLE = len(PROMPT) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return make_engine()


@pytest.fixture(scope="module")
def roomy() -> TorchEngine:
    return make_engine(64)


@pytest.fixture(scope="module")
def other() -> TorchEngine:
    return make_engine()


@pytest.fixture
def audited(engine: TorchEngine) -> Iterator[PrefixRig]:
    made = PrefixRig(engine, AUDITS, host_blocks=12)
    yield made
    made.close()


def auditor(audited: PrefixRig) -> SampledAudit:
    assert audited.store is not None and audited.store.auditor is not None
    return audited.store.auditor


def stored(audited: PrefixRig, prompt: list[int]) -> list[int]:
    """The blocks that a prompt's beginning lies in."""
    held = audited.table.find(ref(f"r{audited._names}"))
    assert held is not None and audited.prefixes is not None
    blocks = audited.prefixes.cache.hold(held.names[: len(prompt) // BLOCK_TOKENS])
    audited.prefixes.cache.release(blocks)
    return blocks


prompts = st.builds(
    lambda words, tail: [token for word in words for token in range(word, word + 8)] + [1] * tail,
    st.lists(st.sampled_from((10, 20, 30)), min_size=1, max_size=3),
    st.integers(1, 6),
)


@settings(max_examples=40)
@given(st.lists(st.lists(prompts, min_size=1, max_size=2), min_size=1, max_size=6), st.integers(3, 40))
def test_rounding_is_no_mistake_and_the_text_is_the_same(
    roomy: TorchEngine, other: TorchEngine, waves: list[list[list[int]]], chunk: int
) -> None:
    audited = PrefixRig(roomy, AUDITS, host_blocks=12)  # what is compared is there twice for a while
    plain = PrefixRig(other, None)
    for wave in waves:
        assert audited.serve(wave, chunk=chunk) == plain.serve(wave)
        audited.check_integrity()
    assert auditor(audited).wrong_blocks == 0
    audited.close()


def test_a_hit_is_computed_and_compared(audited: PrefixRig) -> None:
    first = audited.serve([PROMPT], chunk=40)
    assert audited.serve([PROMPT], chunk=40) == first
    assert audited.prefilled_tokens == 2 * len(PROMPT) and audited.hits == []
    assert auditor(audited).audited_blocks == WHOLE
    audited.check_integrity()


@pytest.mark.parametrize("at", range(WHOLE))
def test_what_is_wrong_is_forgotten_and_who_reads_it_is_computed_again(audited: PrefixRig, at: int) -> None:
    first = audited.serve([PROMPT], chunk=40)
    blocks = stored(audited, PROMPT)
    auditor(audited)._rate = 0.0
    audited._run(plan(50, starts=(spec(ref("x"), PROMPT),), prefills=(prefill(ref("x"), 0, 18),)), now_s=0.0)
    reader = audited.table.find(ref("x"))
    assert reader is not None and list(reader.blocks[:WHOLE]) == blocks
    audited.engine.pools[1][0][blocks[at], 0, 0, 1] += 1.0
    auditor(audited)._rate = 1.0
    audited.plans = 60
    assert audited.serve([PROMPT], chunk=40) == first
    assert auditor(audited).wrong_blocks == 1
    assert reader.finish_reason is FinishReason.KV_LOST
    assert stored(audited, PROMPT)[:at] == blocks[:at], "what precedes it was right"
    assert len(stored(audited, PROMPT)) == WHOLE, "and is stored anew from there on"
    assert blocks[at] not in stored(audited, PROMPT)
    assert audited.serve([PROMPT], chunk=40) == first and auditor(audited).wrong_blocks == 1
    audited.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_of_the_digits_are_no_rounding(dtype: torch.dtype) -> None:
    key, value = torch.randn(3, 1, 2, 4).to(dtype), torch.randn(3, 1, 4, 2).to(dtype)
    for pool in (key, value):
        pool[1:] = pool[0]
    audit = SampledAudit(Records([(key, value)]), [(key, value)], 1.0)
    assert audit.tolerance == pytest.approx(torch.finfo(dtype).eps ** 0.5, rel=0.5)
    assert audit.agree(0, 1)
    largest = value[0].abs().max()
    value[1, 0, 0, 0] += largest * audit.tolerance / 4
    assert audit.agree(0, 1)
    value[1, 0, 0, 0] += largest * audit.tolerance * 4
    assert not audit.agree(0, 1) and audit.agree(0, 2)
    key[2, 0, 0, 0] = torch.nan
    assert not audit.agree(0, 2)


def test_int8_is_compared_by_what_it_stands_for() -> None:
    key, value = (torch.zeros(size, dtype=torch.int8) for size in ((3, 1, 8 + 4, 4), (3, 1, 4, 8 + 4)))
    pool, rows = library.describe_pool(key, value), torch.randn(4, 1, 8)
    for block, numbers in enumerate((rows, 1.001 * rows, rows.flip(2))):
        library.write(library.load(), pool, numbers, numbers, torch.arange(4 * block, 4 * block + 4))
    audit = SampledAudit(Records([(key, value)]), [(key, value)], 1.0)
    assert audit.agree(0, 1) and not audit.agree(0, 2)


def test_whole_numbers_are_equal_or_not() -> None:
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    tokens[1] = tokens[0]
    audit = SampledAudit(Records([(tokens,)]), [(tokens,)], 1.0)
    assert audit.agree(0, 1)
    tokens[1, 3] += 1
    assert not audit.agree(0, 1)
