"""Lent memory of one tier, over tensors: the pools of all layers, and who attends to them.

Host memory is a pool of its own beside the worker's KV, in the same layout, always in RAM. Knows no grant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.attention import LayerShape, PagedAttention, make_pools
from services.worker.engine.backends import Pools
from services.worker.engine.paged import Shape
from services.worker.engine.spans import PackedSpans
from services.worker.peers.attention.exchange import serve
from services.worker.peers.attention.interfaces import Brought, LentBlocks, Question, Turn
from services.worker.peers.attention.seals import NativeSeals, SealedBackend, TorchSeals
from services.worker.peers.transport.base import Buffer, bytes_of
from services.worker.peers.transport.pipe import Pipe
from shared.errors import InvalidMessage


@dataclass(frozen=True)
class LentMemory(LentBlocks):
    """`LentBlocks` over all layers' pools of one tier."""

    pools: Sequence[Pools]
    backend: SealedBackend
    attends: bool = True

    @property
    def blocks(self) -> int:
        return len(self.pools[0][0])

    @property
    def _device(self) -> torch.device:
        return self.pools[0][0].device

    @property
    def is_native(self) -> bool:
        return isinstance(self.backend, NativeSeals)

    def sizes_bytes(self, asked: Question, rows: int, kept: int) -> list[int]:
        """See `LentBlocks`: queries, keys and values, fp32."""
        return [4 * math.prod(shape) for shape in self._shapes(asked, rows, kept)]

    def write(self, asked: Question, brought: Brought, slots: npt.NDArray[np.int64]) -> None:
        shapes = self._shapes(asked, 0, len(slots))[-2:]
        keys, values = (self._floats(*each) for each in zip(brought[-2:], shapes, strict=True))
        self.backend.write(asked.layer, keys, values, torch.from_numpy(slots).to(self._device))

    def attend(self, asked: Question, spans: PackedSpans, brought: Brought) -> list[Buffer]:
        """Return output and log-sum-exp."""
        shape = self._shapes(asked, int(spans.first_row[-1]), 0)[0]
        queries = self._floats(brought[0], shape)
        how = Shape(asked.scaling, asked.softcap)
        output, lse = self.backend.attend_part(asked.layer, spans, queries, how)
        return [bytes_of(output.cpu().contiguous()), bytes_of(lse.cpu().contiguous())]

    def copy(self, layer: int, blocks: npt.NDArray[np.int32]) -> list[Buffer]:
        indices = torch.from_numpy(blocks).to(self._device)
        return [bytes_of(pool.index_select(0, indices).cpu()) for pool in self.pools[layer]]

    def verify(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        self.backend.verify(layer, blocks)

    def adopt(self, blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]) -> None:
        self.backend.adopt(blocks, loans)

    def serve(self, pipe: Pipe, lent: npt.NDArray[np.bool_], *, q_heads: int, is_full: bool) -> Turn:
        assert isinstance(self.backend, NativeSeals)
        return serve(self.backend.memory, pipe, lent, q_heads=q_heads, is_full=is_full)

    def _shapes(self, asked: Question, rows: int, kept: int) -> list[tuple[int, int, int]]:
        k_pool, v_pool = self.pools[asked.layer]
        kv_heads, head_dim, value_dim = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
        if asked.q_heads % kv_heads:
            raise InvalidMessage(f"{asked.q_heads} query heads for {kv_heads} of keys")
        shapes = [(kept, kv_heads, head_dim), (kept, kv_heads, value_dim)]
        return [(rows, asked.q_heads, head_dim), *shapes] if asked.q_heads else shapes

    def _floats(self, buffer: npt.NDArray[np.uint8], shape: tuple[int, int, int]) -> torch.Tensor:
        return torch.from_numpy(buffer.view(np.float32)).view(shape).to(self._device)


def device_memory(attention: PagedAttention) -> LentMemory:
    """Return the engine's own pools as lent memory."""
    return LentMemory(attention.pools, _sealed(attention, attention.pools))


def host_memory(attention: PagedAttention, blocks: int, *, attends: bool = True) -> LentMemory:
    """Allocate `blocks` in RAM in the layout of the engine's pools. Pages are used once written."""
    k_pool, _ = attention.pools[0]
    block_tokens, dtype, cpu = k_pool.shape[3], k_pool.dtype, torch.device("cpu")
    shapes = [LayerShape(k.shape[1], k.shape[2], v.shape[3]) for k, v in attention.pools]
    pools = [make_pools(shape, blocks, block_tokens, dtype, cpu) for shape in shapes]
    return LentMemory(pools, _sealed(attention, pools), attends)


def _sealed(attention: PagedAttention, pools: Sequence[Pools]) -> SealedBackend:
    k_pool, _ = pools[0]
    library = attention.library_for(k_pool.device)
    if library is not None:
        return NativeSeals(library, pools, attention.threads)
    return TorchSeals(attention.partial_backend(pools), pools, k_pool.shape[3])
