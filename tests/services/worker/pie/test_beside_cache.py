"""Pie's blocks and the prefix cache's lie in one host memory, through the real engine and real copies."""

import random
from typing import Any

import pytest

from services.worker.core.settings import PieSettings, PrefixCacheConfig
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.store import KvStore, open_store
from services.worker.kv.transfers import TransferEngine
from services.worker.pie.blocks import BlockPie
from shared.errors import ConfigError
from tests.services.worker.conftest import VOCABULARY
from tests.services.worker.prefix_rig import BLOCK_TOKENS, PrefixRig

DEVICE_BLOCKS, HOST_BLOCKS = 34, 40
"""At level 5 there is room for 68 blocks, 17 of the device being buffers."""


def engine_of(
    llama: Any, *, level: int, kv_blocks: int = DEVICE_BLOCKS, attention: AttentionMode = "auto"
) -> TorchEngine:
    pie = PieSettings(enabled=level > 0, expansion="fixed", fifo_layers=level)
    return TorchEngine(
        describe(llama),
        kv_blocks=kv_blocks,
        block_tokens=BLOCK_TOKENS,
        pie=pie,
        cache_blocks=HOST_BLOCKS,
        attention=attention,
    )


def prompts(count: int, length: int) -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)]


def rig_of(engine: TorchEngine) -> PrefixRig:
    return PrefixRig(engine, PrefixCacheConfig(), host_blocks=HOST_BLOCKS)


def store_of(rig: PrefixRig) -> KvStore:
    assert rig.store is not None
    return rig.store


@pytest.mark.parametrize("attention", ["native", "torch"])
def test_what_leaves_the_pool_is_the_caches_where_it_lies_and_is_found_again(
    llama: Any, attention: AttentionMode
) -> None:
    """Seven prompts of 12 blocks want 84 where there are 68: what has to go lies on the host already."""
    asked = prompts(7, 48)
    plain = PrefixRig(engine_of(llama, level=0, kv_blocks=256, attention=attention), None)
    expected = [plain.serve([prompt])[0] for prompt in asked]
    engine = engine_of(llama, level=5, attention=attention)
    assert isinstance(engine.pie, BlockPie)
    rig = rig_of(engine)
    cache = store_of(rig).cache
    for _ in range(3):
        for prompt, text in zip(asked, expected, strict=True):
            assert rig.serve([prompt]) == [text]
            engine.pie.kv.residency.check_integrity()
        rig.check_integrity()
    assert cache.counts["adopted"] > 0, "no block was on the host already"
    assert cache.counts["hits_host"] > 0
    copied = cache.counts["saved_ahead"] + cache.counts["saved_late"]
    assert cache.counts["adopted"] > copied, "most of what leaves was copied a second time"
    rig.close()
    engine.pie.close()


def test_a_copy_on_the_host_that_was_changed_is_not_what_a_block_leaves_the_device_for(llama: Any) -> None:
    """A hit brings blocks to the device, whose copies stay; spoilt there, they are written anew before a
    block lies in them."""
    asked = prompts(7, 48)
    plain = PrefixRig(engine_of(llama, level=0, kv_blocks=256), None)
    expected = [plain.serve([prompt])[0] for prompt in asked]
    engine = engine_of(llama, level=5)
    assert isinstance(engine.pie, BlockPie)
    rig = rig_of(engine)
    store = store_of(rig)
    for _ in range(4):
        for prompt, text in zip(asked, expected, strict=True):
            assert rig.serve([prompt]) == [text]
            rig.settle()
            for node in store.cache._books.tree:
                place = node.places[Tier.HOST]
                if place is not None and not node.is_outside:
                    store.host.row(place)[::7] ^= 1
    rig.check_integrity()
    assert store.cache.counts["copies_lost"] > 0
    rig.close()
    engine.pie.close()


def test_a_host_tier_that_the_engine_has_no_memory_for_is_refused(llama: Any) -> None:
    engine = engine_of(llama, level=5)
    config, transfers = PrefixCacheConfig(), TransferEngine(lambda: None)
    with pytest.raises(ConfigError, match="host memory for 40 blocks of a prefix cache, not 41"):
        open_store(config, engine, "worker-0", transfers, host_blocks=HOST_BLOCKS + 1)
    assert isinstance(engine.pie, BlockPie)
    engine.pie.close()
