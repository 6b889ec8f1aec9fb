"""The memory of one tier out of which a creditor lends: pools of all layers, and who attends in them.

Host memory is a pool of its own beside the worker's KV, of the same layout, and lies in the machine's RAM
whatever the engine runs on. Whether the creditor attends to keys there is settled when the pool is made: on a
worker whose engine runs on a GPU the debtor fetches them instead, unless told otherwise. Knows no grant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.attention import LayerShape, PagedAttention, make_pools
from services.worker.engine.backends import NativeBackend, PartialBackend, Pools, TorchBackend
from services.worker.engine.native import library as native
from services.worker.peers.lending.core.settings import LendingConfig
from shared.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True)
class LentMemory:
    """All layers' pools of one tier."""

    pools: Sequence[Pools]
    backend: PartialBackend
    attends: bool = True
    """Questions are computed; else blocks are only written and fetched."""

    @property
    def blocks(self) -> int:
        return len(self.pools[0][0])

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pools in self.pools for pool in pools)


def device_memory(attention: PagedAttention) -> LentMemory:
    """The engine's own pools."""
    return LentMemory(attention.pools, attention.partial_backend(attention.pools))


def host_memory(
    attention: PagedAttention, blocks: int, *, attends: bool = True, threads: int = 1
) -> LentMemory:
    """`blocks` in RAM, of the layout of the engine's pools. Pages are taken when first written."""
    k_pool, _ = attention.pools[0]
    block_tokens, dtype, cpu = k_pool.shape[3], k_pool.dtype, torch.device("cpu")
    shapes = [LayerShape(k.shape[1], k.shape[2], v.shape[3]) for k, v in attention.pools]
    pools = [make_pools(shape, blocks, block_tokens, dtype, cpu) for shape in shapes]
    if k_pool.device.type == "cpu":
        return LentMemory(pools, attention.partial_backend(pools), attends)
    library = native.choose("auto", device=cpu, dtype=dtype) if attends else None
    if library is not None:
        return LentMemory(pools, NativeBackend(library, pools, threads), attends)
    return LentMemory(pools, TorchBackend(pools, block_tokens, dtype, cpu), attends)


def block_bytes(attention: PagedAttention) -> int:
    """Of one block, over all layers."""
    return sum(pool[0].nbytes for pools in attention.pools for pool in pools)


def host_blocks(config: LendingConfig, attention: PagedAttention) -> int:
    """How many blocks of host memory the settings grant to other workers. Raises ConfigError where they grant
    some memory that holds no block."""
    each_bytes = block_bytes(attention)
    blocks = config.host_blocks or config.host_mb * _MIB // each_bytes
    if config.host_mb and not blocks:
        raise ConfigError(f"host_mb holds no block: one takes {each_bytes} bytes", param="lending.host_mb")
    return blocks
