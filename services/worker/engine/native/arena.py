"""One stretch of memory for a model's packed weights, or KV, in large pages where the system has them.

It is the process's own: Linux gives shared memory no large pages unless told to, and a killed worker's
sockets stay open until all its pages have been given back, one by one.
"""

import mmap

import torch

_PAGE_BYTES = 2 << 20
_FLOAT_BYTES = 4


class Arena:
    """Float32 tensors cut from one mapping, one after the other. Every tensor keeps the mapping alive."""

    def __init__(self, floats: int) -> None:
        size = max(floats * _FLOAT_BYTES, 1) + _PAGE_BYTES
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.float32)
        start = -whole.data_ptr() % _PAGE_BYTES // _FLOAT_BYTES
        self._free = whole[start : start + floats]

    def take(self, floats: int) -> torch.Tensor:
        """The next `[floats]`, zero until written. Raises ValueError when there are no more."""
        if floats > len(self._free):
            raise ValueError(f"{floats} floats wanted of {len(self._free)}")
        taken, self._free = self._free[:floats], self._free[floats:]
        return taken
