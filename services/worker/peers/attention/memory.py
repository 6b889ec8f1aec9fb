"""Lent memory of one tier, over tensors: the pools of all layers, and who attends to them.

Host memory is a pool of its own beside the worker's KV, in the same layout, always in RAM. Knows no grant.

A write seals its block with a digest, for each head, keys and values apart. The digest is compared when the
block is read next: by the operator on its way through the keys (`digest.h`), before a fetch, and before more
rows are written, so that a seal never covers earlier damage. A block has no seal until it is first written
under a grant.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.attention import LayerShape, PagedAttention, make_pools
from services.worker.engine.backends import NativeBackend, PartialBackend, Pools
from services.worker.engine.native import library as native
from services.worker.engine.paged import Shape, dims_of
from services.worker.engine.spans import PackedSpans
from services.worker.peers.attention import exchange
from services.worker.peers.attention.exchange import serve
from services.worker.peers.attention.interfaces import Brought, LentBlocks, Turn
from services.worker.peers.attention.messages import Request
from services.worker.peers.transport.base import Buffer, bytes_of
from services.worker.peers.transport.pipe import Pipe
from shared.errors import CorruptedKv, InvalidMessage


class NativeSeals(NativeBackend):
    """Attention by the C++ operator, which verifies the blocks it uses. Each call raises CorruptedKv."""

    _digests: "ctypes.Array[native.KvDigests]"

    def __init__(self, library: ctypes.CDLL, pools: Sequence[Pools], threads: int) -> None:
        super().__init__(library, pools, threads)
        sizes = [(pool.num_blocks, pool.kv_heads, 2) for pool in self.pools]
        self._seals = [np.zeros(size, dtype=np.uint64) for size in sizes]
        digests = [native.KvDigests(seals.ctypes.data, -1) for seals in self._seals]
        self._digests = (native.KvDigests * len(digests))(*digests)
        kv_pools = (native.KvPool * len(self.pools))(*self.pools)
        self.memory = exchange.NativeMemory(library, kv_pools, self._digests, threads)
        """The memory for C++."""
        self._loans = np.zeros(len(pools[0][0]), dtype=np.int64)

    def verify(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        native.verify(self._library, self.pools[layer], self._digests[layer], blocks)

    def adopt(self, blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]) -> None:
        """Record each block's grant, and drop the seals of earlier grants."""
        changed = _replaced(self._loans, blocks, loans)
        if len(changed):
            for seals in self._seals:
                seals[changed] = 0


class TorchSeals:
    """`NativeSeals` around another backend, for memory without C++, such as a GPU's.

    A seal is the sum of a block's words, each times an odd factor of its place: a change of any single word
    changes the sum."""

    def __init__(self, backend: PartialBackend, pools: Sequence[Pools], block_tokens: int) -> None:
        self._backend = backend
        self._pools = pools
        self._block_tokens = block_tokens
        self._device = pools[0][0].device
        self._seals = [
            torch.zeros(len(k_pool), dtype=torch.int64, device=self._device) for k_pool, _ in pools
        ]
        """Seals by layer; 0: none."""
        self._loans = np.zeros(len(pools[0][0]), dtype=np.int64)
        widest = max(_words(pool[:1]).shape[1] for layer in pools for pool in layer)
        generator = torch.Generator().manual_seed(0)
        self._factors = (torch.randint(1 << 62, (2, widest), generator=generator) | 1).to(self._device)
        """Factors for keys and for values."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        blocks = torch.unique(slots[slots >= 0] // self._block_tokens)
        self._verify(layer, blocks)
        self._backend.write(layer, keys, values, slots)
        self._seals[layer][blocks] = self._sums(layer, blocks)

    def attend_part(
        self, layer: int, packed: PackedSpans, queries: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.verify(layer, packed.blocks)
        return self._backend.attend_part(layer, packed, queries, shape)

    def verify(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        self._verify(layer, torch.from_numpy(blocks).to(self._device).long())

    def adopt(self, blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]) -> None:
        changed = torch.from_numpy(_replaced(self._loans, blocks, loans)).to(self._device).long()
        for seals in self._seals:
            seals[changed] = 0

    def _verify(self, layer: int, blocks: torch.Tensor) -> None:
        seals = self._seals[layer][blocks]
        wrong = blocks[(seals != 0) & (seals != self._sums(layer, blocks))]
        if len(wrong):
            block = int(wrong[0])
            raise CorruptedKv(f"block {block} is not what was written to it", block=block)

    def _sums(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(blocks), dtype=torch.int64, device=self._device)
        for factors, pool in zip(self._factors, self._pools[layer], strict=True):
            words = _words(pool[blocks])
            total += (words.long() * factors[: words.shape[1]]).sum(1)
        return torch.where(total == 0, 1, total)


SealedBackend = NativeSeals | TorchSeals


def _replaced(
    grants: npt.NDArray[np.int64], blocks: npt.NDArray[np.int32], loans: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Record grants of blocks; return the blocks whose grant changed."""
    changed: npt.NDArray[np.int32] = blocks[grants[blocks] != loans]
    grants[blocks] = loans
    return changed


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks as int16 or int32 `[blocks, words]`."""
    return blocks.flatten(1).view(torch.int32 if blocks.dtype.itemsize == 4 else torch.int16)


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

    def sizes_bytes(self, asked: Request, rows: int, kept: int) -> list[int]:
        """See `LentBlocks`: queries, keys and values, fp32."""
        return [4 * math.prod(shape) for shape in self._shapes(asked, rows, kept)]

    def write(self, asked: Request, brought: Brought, slots: npt.NDArray[np.int64]) -> None:
        shapes = self._shapes(asked, 0, len(slots))[-2:]
        keys, values = (self._floats(*each) for each in zip(brought[-2:], shapes, strict=True))
        self.backend.write(asked.layer, keys, values, torch.from_numpy(slots).to(self._device))

    def attend(self, asked: Request, spans: PackedSpans, brought: Brought) -> list[Buffer]:
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

    def _shapes(self, asked: Request, rows: int, kept: int) -> list[tuple[int, int, int]]:
        k_pool, v_pool = self.pools[asked.layer]
        kv_heads, (head_dim, value_dim) = k_pool.shape[1], dims_of((k_pool, v_pool))
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
    shapes = [LayerShape(pools[0].shape[1], *dims_of(pools)) for pools in attention.pools]
    pools = [make_pools(shape, blocks, block_tokens, dtype, cpu) for shape in shapes]
    return LentMemory(pools, _sealed(attention, pools), attends)


def _sealed(attention: PagedAttention, pools: Sequence[Pools]) -> SealedBackend:
    k_pool, _ = pools[0]
    library = attention.library_for(k_pool.device)
    if library is not None:
        return NativeSeals(library, pools, attention.threads)
    return TorchSeals(attention.partial_backend(pools), pools, k_pool.shape[3])
