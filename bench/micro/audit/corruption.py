"""Seeded corruptions of bytes, as from faulty memory, disks and cables."""

from random import Random

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
"""One-dimensional and writable; changed in place."""
_MOST_BYTES = 4096
"""Longest stretch."""


def corrupt(memory: Bytes, rng: Random) -> str:
    """Change some bytes and return the kind of corruption. The result always differs from the original."""
    before = memory.copy()
    while True:
        kind = rng.choice(("one bit", "two bits", "a byte", "zeros", "noise", "another place's"))
        _KINDS[kind](memory, rng)
        if not np.array_equal(memory, before):
            return kind
        memory[:] = before


def _bit(memory: Bytes, rng: Random) -> None:
    memory[rng.randrange(len(memory))] ^= 1 << rng.randrange(8)


def _two_bits(memory: Bytes, rng: Random) -> None:
    _bit(memory, rng)
    _bit(memory, rng)


def _byte(memory: Bytes, rng: Random) -> None:
    memory[rng.randrange(len(memory))] ^= rng.randrange(1, 256)


def _zeros(memory: Bytes, rng: Random) -> None:
    first, size = _stretch(memory, rng)
    memory[first : first + size] = 0


def _noise(memory: Bytes, rng: Random) -> None:
    first, size = _stretch(memory, rng)
    memory[first : first + size] = np.frombuffer(rng.randbytes(size), dtype=np.uint8)


def _elsewhere(memory: Bytes, rng: Random) -> None:
    first, size = _stretch(memory, rng)
    source = rng.randrange(len(memory) - size + 1)
    memory[first : first + size] = memory[source : source + size].copy()


def _stretch(memory: Bytes, rng: Random) -> tuple[int, int]:
    size = rng.randrange(1, min(_MOST_BYTES, len(memory)) + 1)
    return rng.randrange(len(memory) - size + 1), size


_KINDS = {
    "one bit": _bit,
    "two bits": _two_bits,
    "a byte": _byte,
    "zeros": _zeros,
    "noise": _noise,
    "another place's": _elsewhere,
}
