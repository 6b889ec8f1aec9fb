"""The memory of one tier out of which a creditor lends: pools of all layers, and who attends in them.

Host memory is a pool of its own beside the worker's KV, of the same layout, and lies in the machine's RAM
whatever the engine runs on. Whether the creditor attends to keys there is settled when the pool is made: on a
worker whose engine runs on a GPU the debtor fetches them instead, unless told otherwise. Knows no grant.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.attention import LayerShape, PagedAttention, make_pools
from services.worker.engine.backends import Pools, TorchBackend
from services.worker.engine.native import library as native
from services.worker.peers.attention.seals import NativeSeals, SealedBackend, SlowSeals
from services.worker.peers.lending.core.settings import LendingConfig
from shared.errors import ConfigError

_MIB = 1 << 20


@dataclass(frozen=True)
class LentMemory:
    """All layers' pools of one tier."""

    pools: Sequence[Pools]
    backend: SealedBackend
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
    return LentMemory(attention.pools, _sealed(attention.pools, attention.library, attention.threads))


def host_memory(attention: PagedAttention, blocks: int, *, attends: bool = True) -> LentMemory:
    """`blocks` in RAM, of the layout of the engine's pools. Pages are taken when first written."""
    k_pool, _ = attention.pools[0]
    block_tokens, dtype, cpu = k_pool.shape[3], k_pool.dtype, torch.device("cpu")
    shapes = [LayerShape(k.shape[1], k.shape[2], v.shape[3]) for k, v in attention.pools]
    pools = [make_pools(shape, blocks, block_tokens, dtype, cpu) for shape in shapes]
    if k_pool.device.type == "cpu":
        return LentMemory(pools, _sealed(pools, attention.library, attention.threads), attends)
    library = native.choose("auto", device=cpu, dtype=dtype)
    return LentMemory(pools, _sealed(pools, library, 1), attends)


def _sealed(pools: Sequence[Pools], library: ctypes.CDLL | None, threads: int) -> SealedBackend:
    if library is not None:
        return NativeSeals(library, pools, threads)
    k_pool, _ = pools[0]
    backend = TorchBackend(pools, k_pool.shape[3], k_pool.dtype, k_pool.device)
    return SlowSeals(backend, pools, k_pool.shape[3])


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
