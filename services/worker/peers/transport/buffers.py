"""Tensors and arrays as the plain bytes that a transport moves, without copying. CPU memory only."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from services.worker.peers.transport.base import Buffer

if TYPE_CHECKING:
    import torch


def bytes_of(memory: "torch.Tensor | npt.NDArray[Any] | bytearray | bytes | memoryview") -> Buffer:
    """Its bytes, in place. Raises ValueError when it is not contiguous or not in the CPU's memory."""
    if isinstance(memory, np.ndarray):
        if not memory.flags.c_contiguous:
            raise ValueError("a contiguous array is needed")
        return memory.reshape(-1).view(np.uint8).data
    if isinstance(memory, bytes | bytearray | memoryview):
        return memoryview(memory).cast("B")
    return _bytes_of_tensor(memory)


def _bytes_of_tensor(tensor: "torch.Tensor") -> Buffer:
    from torch import uint8

    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"a contiguous tensor on the CPU is needed, not one on {tensor.device}")
    array: npt.NDArray[np.uint8] = tensor.detach().reshape(-1).view(uint8).numpy()
    return array.data


def sizes_of(buffers: Sequence[Buffer]) -> list[int]:
    """Bytes of each."""
    return [buffer.nbytes for buffer in buffers]
