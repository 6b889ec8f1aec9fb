"""Loads the native library and wraps its attention operator for torch tensors (`attention.h`).

Calls go through ctypes, which releases the GIL."""

import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.native.build import build
from services.worker.engine.paged import Shape, dims_of
from services.worker.engine.spans import PackedSpans
from shared.errors import ConfigError, CorruptedKv, InternalError

AttentionMode = Literal["auto", "native", "torch"]

_log = logging.getLogger("kvasir.worker.native")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_REFUSALS = {
    -1: "pools of a kind it does not know",
    -2: "query heads that are no multiple of the KV heads",
    -3: "a block or slot that does not exist",
}
_NOT_AS_SEALED = -4


ADDRESS, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
FLOAT, DOUBLE, UINT64 = ctypes.c_float, ctypes.c_double, ctypes.c_uint64


def fields(*kinds: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a C structure from types, each with the names of consecutive members."""
    return [(name, kind) for kind, names in kinds for name in names.split()]


class KvPool(ctypes.Structure):
    """`KvPool` of `attention.h`. Holds addresses: the tensors must outlive it."""

    _fields_ = fields(
        (ADDRESS, "key value"), (INT32, "dtype num_blocks before block_tokens kv_heads head_dim value_dim")
    )


class Spans(ctypes.Structure):
    """`Spans` of `attention.h`. Holds addresses: the arrays must outlive it."""

    _fields_ = fields(
        (INT32, "count"),
        (ADDRESS, "first_row first_position table_start table_position key_end blocks"),
        (INT32, "window_tokens"),
    )


class KvDigests(ctypes.Structure):
    """`KvDigests` of `attention.h`. Holds an address: the array must outlive it."""

    _fields_ = fields((ADDRESS, "of"), (INT32, "bad"))


class _AttendCall(ctypes.Structure):
    _fields_ = fields(
        (ADDRESS, "query"),
        (INT64, "query_stride"),
        (INT32, "q_heads"),
        (FLOAT, "scaling softcap"),
        (ADDRESS, "output lse"),
        (INT32, "threads"),
        (ADDRESS, "digests"),
    )


class NativeDraw(ctypes.Structure):
    """One row's sampling parameters as in `draw.h`; `token` is the result."""

    _fields_ = fields(
        (INT64, "row"),
        (FLOAT, "temperature min_p top_p"),
        (INT32, "top_k"),
        (UINT64, "key"),
        (INT64, "token"),
    )


_POOL, _DIGESTS = ctypes.POINTER(KvPool), ctypes.POINTER(KvDigests)
_ROWS = (_POOL, ADDRESS, INT64, ADDRESS, INT64, ADDRESS, INT32)
Prototype = tuple[Any, tuple[Any, ...]]
"""Result type (None: void) and argument types."""
_PROTOTYPES: dict[str, Prototype] = {
    "kv_attend": (INT32, (_POOL, ctypes.POINTER(Spans), ctypes.POINTER(_AttendCall))),
    "kv_write": (INT32, _ROWS),
    "kv_write_sealed": (INT32, (*_ROWS, _DIGESTS)),
    "kv_verify": (INT32, (_POOL, _DIGESTS, ADDRESS, INT32)),
    "kv_digest": (UINT64, (ADDRESS, INT64)),
    "kv_merge": (None, (ADDRESS,) * 5 + (INT32,) * 3),
    "mask_logits": (None, (ADDRESS, INT32, ADDRESS, ADDRESS, INT32, INT32)),
    "find_likeliest": (None, (ADDRESS, INT32, ADDRESS, ADDRESS, INT32, INT32, ADDRESS, ADDRESS)),
    "draw_tokens": (None, (ADDRESS, ADDRESS, INT32, ADDRESS, ctypes.POINTER(NativeDraw), INT32)),
}


def declare(library: ctypes.CDLL, prototypes: Mapping[str, Prototype]) -> None:
    """Set the types of library functions. Raises AttributeError for a missing one."""
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@cache
def load() -> ctypes.CDLL:
    """Return the library, compiled if necessary. Raises ConfigError if that fails."""
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {error}; remove it to have it built again") from error
    declare(library, _PROTOTYPES)
    return library


@cache
def _load_or_warn() -> ctypes.CDLL | None:
    try:
        return load()
    except ConfigError as error:
        _log.warning("attention runs in plain torch, which is slower: %s", error.message)
        return None


def choose(mode: AttentionMode, *, device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library, or None to compute in plain torch.

    Raises ConfigError in mode "native" without a library for this device and dtype."""
    fits = device.type == "cpu" and dtype in _DTYPES
    if mode == "torch" or (mode == "auto" and not fits):
        return None
    if mode == "auto":
        return _load_or_warn()
    if not fits:
        raise ConfigError(f"native attention knows no {dtype} on {device}: set auto", param="attention")
    try:
        return load()
    except ConfigError as error:
        raise ConfigError(f"{error.message}; or set auto or torch", param="attention") from error


def describe_pool(k_pool: torch.Tensor, v_pool: torch.Tensor, before: int = 0, behind: int = 0) -> KvPool:
    """Return the `KvPool` of K `[num_blocks, kv_heads, head_dim, block_tokens]` and V `[…, value_dim]`.

    Both are contiguous. `before`, `behind`: number of readable blocks on either side in the same memory, with
    ids below 0 and from `num_blocks` on."""
    num_blocks, kv_heads, _, block_tokens = k_pool.shape
    if (num_blocks, kv_heads, block_tokens) != tuple(v_pool.shape[:3]) or k_pool.dtype != v_pool.dtype:
        raise InternalError(f"K {tuple(k_pool.shape)} and V {tuple(v_pool.shape)} are no pools of one layer")
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise InternalError("KV pools must be contiguous")
    sizes = num_blocks + behind, before, block_tokens, kv_heads, *dims_of((k_pool, v_pool))
    return KvPool(k_pool.data_ptr(), v_pool.data_ptr(), _DTYPES[k_pool.dtype], *sizes)


def describe_spans(packed: PackedSpans, window_tokens: int | None = None) -> Spans:
    """Return the `Spans` of `packed`, valid while it lives. `window_tokens` overrides its own."""
    return Spans(
        count=len(packed.first_position),
        first_row=packed.first_row.ctypes.data,
        first_position=packed.first_position.ctypes.data,
        table_start=packed.table_start.ctypes.data,
        table_position=packed.table_position.ctypes.data,
        key_end=packed.key_end.ctypes.data,
        blocks=packed.blocks.ctypes.data,
        window_tokens=window_tokens or packed.window_tokens,
    )


def write(
    library: ctypes.CDLL,
    pool: KvPool,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    digests: KvDigests | None = None,
) -> None:
    """Write `keys`, `values` `[rows, kv_heads, …]` to `slots`, int64 `[rows]`: block * block_tokens + offset.

    With `digests` the blocks are verified first (raises CorruptedKv) and digested again."""
    keys, values = rows_of_heads(keys), rows_of_heads(values)
    strides = keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0)
    given = pool, *strides, slots.data_ptr(), keys.shape[0]
    if digests is None:
        _check(library.kv_write(*given))
    else:
        _check(library.kv_write_sealed(*given, digests), digests)


def verify(library: ctypes.CDLL, pool: KvPool, digests: KvDigests, blocks: npt.NDArray[np.int32]) -> None:
    """Raise CorruptedKv if a block does not match its digest."""
    _check(library.kv_verify(pool, digests, blocks.ctypes.data, len(blocks)), digests)


def attend(
    library: ctypes.CDLL,
    pool: KvPool,
    spans: Spans,
    queries: torch.Tensor,
    shape: Shape,
    threads: int = 1,
    lse: torch.Tensor | None = None,
    digests: KvDigests | None = None,
) -> torch.Tensor:
    """Return attention `[rows, q_heads, value_dim]` of `queries` `[rows, q_heads, head_dim]`, in their dtype.

    Fills `lse`, fp32 `[rows, q_heads]`, contiguous, if given. A row that sees no key gets zeros and −inf.
    Raises CorruptedKv if a block does not match its digest."""
    flat = rows_of_heads(queries)
    rows, q_heads, _ = flat.shape
    output = torch.empty(rows, q_heads, pool.value_dim)
    call = _AttendCall(
        query=flat.data_ptr(),
        query_stride=flat.stride(0),
        q_heads=q_heads,
        scaling=shape.scaling,
        softcap=shape.softcap or 0.0,
        output=output.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        threads=threads,
        digests=None if digests is None else ctypes.addressof(digests),
    )
    _check(library.kv_attend(pool, spans, call), digests)
    return output.to(queries.dtype)


def rows_of_heads(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as fp32 with contiguous heads; a view if possible."""
    rows = rows.float()
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def _check(answer: Any, digests: KvDigests | None = None) -> None:
    if answer == _NOT_AS_SEALED and digests is not None:
        raise CorruptedKv(f"block {digests.bad} is not what was written to it", block=digests.bad)
    if answer:
        reason = _REFUSALS.get(answer, "an unknown reason")
        raise InternalError(f"the native attention operator refused: {reason} ({answer})")
