"""The packed matrix product of `gemm.h` on tensors, by itself: a worker calls it in C++ only."""

import ctypes
from enum import IntEnum

import torch

from services.worker.engine.native.library import declare, load


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


def multiply(
    a: torch.Tensor,
    packed: torch.Tensor,
    c: torch.Tensor,
    epilogue: Epilogue = Epilogue.STORE,
    threads: int = 1,
) -> None:
    """`c` `[rows, outputs]` from `a` `[rows, inputs]`, fp32 on the CPU, rows at any stride."""
    library = load()
    declare(library, {"gemm": (None, (ctypes.POINTER(GemmCall),))})
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
    library.gemm(call)
