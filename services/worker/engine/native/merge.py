"""Parts of attention joined in C++ (`merge.h`), in place. Knows no pool and no worker."""

import ctypes

import torch

from services.worker.engine.native.library import declare

_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PROTOTYPES = {
    "kv_merge": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT32, _INT32, _INT32)),
}


def merge_into(
    library: ctypes.CDLL,
    output: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """As `services.worker.engine.merging.merge_into`; all fp32 on the CPU and contiguous, `rows` int64."""
    declare(library, _PROTOTYPES)
    count, heads, value_dim = part.shape
    library.kv_merge(
        output.data_ptr(),
        lse.data_ptr(),
        part.data_ptr(),
        part_lse.data_ptr(),
        rows.data_ptr(),
        count,
        heads,
        value_dim,
    )
