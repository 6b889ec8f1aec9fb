"""Lent host memory as whole blocks, for engines of every kind."""

import numpy as np

from services.worker.kv.store import CacheableEngine
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.assembly import host_blocks
from services.worker.peers.attention.interfaces import LentBlocks
from services.worker.peers.lending.core.settings import LendingConfig


def lent_records(
    config: LendingConfig, engine: CacheableEngine, host: LentBlocks | None
) -> tuple[Records, int] | None:
    """What is lent of host memory, as rows of bytes, and how many blocks that are: `host` itself where
    attention works on it, else memory that is only written to and read. None where none is lent. Raises
    ConfigError where the settings grant less than a block."""
    if host is not None:
        return Records(host.pools), host.blocks
    blocks = host_blocks(config, engine.pools) if config.lend else 0
    if not blocks:
        return None
    rows = np.zeros((blocks, engine.records().record_bytes), dtype=np.uint8)  # touched when first written
    return Records([(rows,)]), blocks
