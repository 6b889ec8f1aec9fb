"""Tokens drawn in C++ (`draw.h`), for rows whose logits are on the CPU. Knows no penalties and no seeds."""

import ctypes

import torch

from services.worker.engine.native.library import declare


class Draw(ctypes.Structure):
    """`draw.h`: one row's wishes; `token` is the answer."""

    _fields_ = (
        ("row", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("uniform", ctypes.c_double),
        ("token", ctypes.c_int64),
    )


_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PROTOTYPES = {
    "draw_tokens": (None, (_POINTER, _POINTER, _INT32, _POINTER, ctypes.POINTER(Draw), _INT32)),
}


def draw_tokens(
    library: ctypes.CDLL, logits: torch.Tensor, highest: torch.Tensor, wishes: list[Draw]
) -> list[int]:
    """A token for each wish, from `logits` `[rows, vocabulary]` (fp32, contiguous), `highest` of each row.

    A row whose highest logit is not finite gets any token.
    """
    declare(library, _PROTOTYPES)
    draws = (Draw * len(wishes))(*wishes)
    scratch = torch.empty(logits.shape[1])
    library.draw_tokens(
        logits.data_ptr(), highest.data_ptr(), logits.shape[1], scratch.data_ptr(), draws, len(wishes)
    )
    return [draw.token for draw in draws]
