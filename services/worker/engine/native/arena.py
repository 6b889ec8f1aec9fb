"""Memory for packed weights or KV, in huge pages if the system has them.

The mapping is private: Linux backs shared memory with huge pages only if configured to. With small pages a
killed worker's sockets stay open while its pages are freed.
"""

import mmap

import torch

_PAGE_BYTES = 2 << 20
_FLOAT_BYTES = 4


class Arena:
    """Allocator of consecutive fp32 tensors in one mapping, which every tensor keeps alive."""

    def __init__(self, floats: int) -> None:
        size = max(floats * _FLOAT_BYTES, 1) + _PAGE_BYTES
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.float32)
        start = -whole.data_ptr() % _PAGE_BYTES // _FLOAT_BYTES
        self._free = whole[start : start + floats]

    def take(self, floats: int) -> torch.Tensor:
        """Return the next tensor `[floats]`, zeroed. Raises ValueError if the arena is full."""
        if floats > len(self._free):
            raise ValueError(f"{floats} floats wanted of {len(self._free)}")
        taken, self._free = self._free[:floats], self._free[floats:]
        return taken
