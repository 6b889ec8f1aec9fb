"""The packed matrix product of `gemm.h` on tensors: packing at load, and the product by itself."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch

from services.worker.engine.native.arena import Arena
from services.worker.engine.native.library import declare


class Epilogue(IntEnum):
    """What is done to a product's result before it is written (`gemm.h`)."""

    STORE = 0
    ADD = 1
    SILU_MUL = 2


class GemmCall(ctypes.Structure):
    """The arguments of one product, laid out as `gemm.h` has them."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("a_stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("c", ctypes.c_void_p),
        ("c_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("epilogue", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_PROTOTYPES = {
    "gemm_packed_floats": (_INT64, (_INT32, _INT32)),
    "gemm_packed_pair_floats": (_INT64, (_INT32, _INT32)),
    "gemm_pack": (None, (_POINTER, _INT64, _INT32, _INT32, _POINTER)),
    "gemm_pack_pair": (None, (_POINTER, _POINTER, _INT64, _INT32, _INT32, _POINTER)),
    "gemm": (None, (ctypes.POINTER(GemmCall),)),
}


class Gemm:
    """The functions of `gemm.h`."""

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
        """Two matrices of equal shape, for `Epilogue.SILU_MUL`."""
        gate, up = gate.contiguous(), up.contiguous()
        outputs, inputs = gate.shape
        packed = arena.take(self.packed_pair_floats(outputs, inputs))
        self._library.gemm_pack_pair(
            gate.data_ptr(), up.data_ptr(), inputs, outputs, inputs, packed.data_ptr()
        )
        return packed

    def multiply(
        self,
        a: torch.Tensor,
        packed: torch.Tensor,
        c: torch.Tensor,
        epilogue: Epilogue = Epilogue.STORE,
        threads: int = 1,
    ) -> None:
        """`c` `[rows, outputs]` from `a` `[rows, inputs]`, fp32 on the CPU, rows at any stride."""
        call = GemmCall(
            a=a.data_ptr(),
            a_stride=a.stride(0),
            packed=packed.data_ptr(),
            c=c.data_ptr(),
            c_stride=c.stride(0),
            rows=a.shape[0],
            outputs=c.shape[1],
            inputs=a.shape[1],
            epilogue=epilogue,
            threads=threads,
        )
        self._library.gemm(call)
