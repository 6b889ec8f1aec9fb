"""Packing for the matrix product of `gemm.h`, at load. The product itself is called in C++ only."""

import ctypes
from collections.abc import Sequence

import torch

from services.worker.engine.native.arena import Arena
from services.worker.engine.native.library import declare

_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_PROTOTYPES = {
    "gemm_packed_floats": (_INT64, (_INT32, _INT32)),
    "gemm_packed_pair_floats": (_INT64, (_INT32, _INT32)),
    "gemm_pack": (None, (_POINTER, _INT64, _INT32, _INT32, _POINTER)),
    "gemm_pack_pair": (None, (_POINTER, _POINTER, _INT64, _INT32, _INT32, _POINTER)),
}


class Gemm:
    """The functions of `gemm.h` that pack."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, _PROTOTYPES)
        self._library = library

    def packed_floats(self, outputs: int, inputs: int) -> int:
        """What a packed matrix `[outputs, inputs]` takes."""
        return int(self._library.gemm_packed_floats(outputs, inputs))

    def packed_pair_floats(self, outputs: int, inputs: int) -> int:
        """What two matrices of this shape take, packed as a pair."""
        return int(self._library.gemm_packed_pair_floats(outputs, inputs))

    def pack(self, weights: Sequence[torch.Tensor], arena: Arena) -> torch.Tensor:
        """One matrix of several `[outputs, inputs]` fp32, their outputs one after the other."""
        joined = torch.cat(list(weights)) if len(weights) > 1 else weights[0].contiguous()
        outputs, inputs = joined.shape
        packed = arena.take(self.packed_floats(outputs, inputs))
        self._library.gemm_pack(joined.data_ptr(), inputs, outputs, inputs, packed.data_ptr())
        return packed

    def pack_pair(self, gate: torch.Tensor, up: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Two matrices of equal shape, for the product through SiLU."""
        gate, up = gate.contiguous(), up.contiguous()
        outputs, inputs = gate.shape
        packed = arena.take(self.packed_pair_floats(outputs, inputs))
        self._library.gemm_pack_pair(
            gate.data_ptr(), up.data_ptr(), inputs, outputs, inputs, packed.data_ptr()
        )
        return packed
