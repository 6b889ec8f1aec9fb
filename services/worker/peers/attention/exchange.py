"""Native steps over a link's socket: both ends of `engine/native/exchange.h`.

A creditor's link thread runs `serve`, without the interpreter's lock, while its debtor's steps arrive.
`Asker` is the debtor's side. Knows the arrays of a part, pools and a link's socket; no grant.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.engine.native.library import (
    ADDRESS,
    DOUBLE,
    FLOAT,
    INT32,
    INT64,
    KvDigests,
    KvPool,
    Spans,
    declare,
    describe_spans,
    fields,
    rows_of_heads,
)
from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part
from services.worker.peers.attention.interfaces import Turn
from services.worker.peers.transport.pipe import Pipe
from shared.errors import (
    CorruptedKv,
    DeadlineExceeded,
    InternalError,
    InvalidMessage,
    KvasirError,
    PeerLost,
    StaleEpoch,
)

_LATE, _LOST, _MANGLED, _STOPPED, _FULL, _STALE = range(-10, -16, -1)
_CORRUPTED = -4
_IDLE_S = 0.05
"""A creditor leaves its grants after this long without a step."""
_TURN_S = 0.05
"""It checks its grants again after this long with steps."""
_PATIENCE_S = 5.0
"""Deadline for the next layer of a step: the length of a lease."""


class _Serving(ctypes.Structure):
    _fields_ = fields(
        (INT32, "fd layers"),
        (ctypes.POINTER(KvPool), "pools"),
        (ctypes.POINTER(KvDigests), "digests"),
        (ADDRESS, "lent"),
        (INT32, "q_heads threads is_full"),
        (DOUBLE, "idle_s turn_s patience_s"),
        (ADDRESS, "ahead"),
        (INT64, "ahead_bytes ahead_used"),
        (DOUBLE, "compute_s"),
        (INT32, "layer"),
    )


class _Asking(ctypes.Structure):
    _fields_ = fields(
        (INT32, "fd layer rows kept q_heads kv_heads head_dim value_dim"),
        (ADDRESS, "row kept_row"),
        (ctypes.POINTER(Spans), "spans"),
        (INT32, "blocks"),
        (ADDRESS, "slots query"),
        (INT64, "query_stride"),
        (ADDRESS, "key"),
        (INT64, "key_stride"),
        (ADDRESS, "value"),
        (INT64, "value_stride"),
        (FLOAT, "scaling softcap"),
        (DOUBLE, "deadline_s"),
        (ADDRESS, "output lse"),
        (DOUBLE, "compute_s"),
    )


_PROTOTYPES = {
    "kv_serve": (INT32, (ctypes.POINTER(_Serving),)),
    **{
        f"kv_{name}": (INT32, (ctypes.POINTER(_Asking),))
        for name in ("step", "ask", "take", "give_up", "stop")
    },
}


@dataclass(frozen=True, slots=True)
class NativeMemory:
    """All layers' pools of one tier, and their digests, for the library. Its maker keeps the memory alive."""

    library: ctypes.CDLL
    pools: "ctypes.Array[KvPool]"
    digests: "ctypes.Array[KvDigests]"
    threads: int


def serve(
    memory: NativeMemory, pipe: Pipe, lent: npt.NDArray[np.bool_], *, q_heads: int, is_full: bool
) -> Turn:
    """Answer steps about `lent` blocks for at most 50 ms, and finish the last. `is_full`: refuse to compute.

    Raises DeadlineExceeded when the debtor is silent within a step, PeerLost and InvalidMessage. Raises
    StaleEpoch for other blocks, and CorruptedKv, after telling the debtor."""
    if len(lent) < memory.pools[0].num_blocks:
        raise InternalError(f"{len(lent)} blocks could be lent of {memory.pools[0].num_blocks}")
    declare(memory.library, _PROTOTYPES)
    serving = _Serving(
        layers=len(memory.pools),
        pools=memory.pools,
        digests=memory.digests,
        lent=lent.ctypes.data,
        q_heads=q_heads,
        threads=memory.threads,
        is_full=is_full,
        idle_s=_IDLE_S,
        turn_s=_TURN_S,
        patience_s=_PATIENCE_S,
    )
    answers: list[int] = []

    def use(descriptor: int, ahead: memoryview) -> int:
        held = np.frombuffer(ahead, dtype=np.uint8)
        serving.fd, serving.ahead, serving.ahead_bytes = descriptor, held.ctypes.data, len(held)
        answers.append(memory.library.kv_serve(serving))
        return int(serving.ahead_used)

    pipe.lend(use)
    if answers[0] == _CORRUPTED:
        block = memory.digests[serving.layer].bad
        raise CorruptedKv(f"block {block} is not what was written to it", block=block)
    if answers[0] != _STOPPED:
        _check(answers[0])
    return Turn(serving.compute_s, answers[0] == _STOPPED)


class Asker:
    """The debtor's side of an exchange. All calls raise DeadlineExceeded and PeerLost.

    A step is `begin`, then `ask` and `take` for each layer, or `give_up` before a layer. `stop` ends the
    exchange between two steps."""

    def __init__(self, library: ctypes.CDLL, pipe: Pipe, deadline_s: float) -> None:
        """`deadline_s`: for each message and each answer."""
        declare(library, _PROTOTYPES)
        self._library = library
        self._pipe = pipe
        self._asking = _Asking(deadline_s=deadline_s)
        self._part: tuple[object, ...] = ()
        """Keeps the memory alive that the description points to."""
        self._output = torch.empty(0, 0, 0)
        self._lse = torch.empty(0, 0)
        self.moved_bytes = 0
        """Bytes of the last request and its answer."""

    def begin(self, part: Part) -> None:
        """Begin a step of this part."""
        asking, spans = self._asking, part.spans
        kept = part.rows[part.kept]
        described = describe_spans(spans)
        asking.rows, asking.kept, asking.blocks = len(part.rows), len(kept), len(spans.blocks)
        asking.row, asking.kept_row, asking.slots = (
            each.ctypes.data for each in (part.rows, kept, spans.slots)
        )
        asking.spans = ctypes.pointer(described)
        self._part = part, kept, described
        self._run(self._library.kv_step)

    def ask(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, shape: Shape) -> None:
        """Ask for one layer. Each tensor is `[rows, heads, dim]`, with all rows of the step."""
        queries, keys, values = (rows_of_heads(each) for each in (queries, keys, values))
        asking = self._asking
        rows, heads, value_dim = asking.rows, queries.shape[1], values.shape[2]
        if self._output.shape != (rows, heads, value_dim):
            self._output, self._lse = torch.empty(rows, heads, value_dim), torch.empty(rows, heads)
            asking.output, asking.lse = self._output.data_ptr(), self._lse.data_ptr()
        asking.layer = layer
        asking.q_heads, asking.kv_heads = heads, keys.shape[1]
        asking.head_dim, asking.value_dim = queries.shape[2], value_dim
        asking.query, asking.query_stride = queries.data_ptr(), queries.stride(0)
        asking.key, asking.key_stride = keys.data_ptr(), keys.stride(0)
        asking.value, asking.value_stride = values.data_ptr(), values.stride(0)
        asking.scaling, asking.softcap = shape.scaling, shape.softcap or 0.0
        sent = rows * heads * queries.shape[2] + asking.kept * keys.shape[1] * (keys.shape[2] + value_dim)
        self.moved_bytes = 4 * (sent + rows * heads * (value_dim + 1))
        self._run(self._library.kv_ask)

    def take(self) -> tuple[Tensor, Tensor, float] | None:
        """Return output and log-sum-exp of the last layer, valid until the next `ask`, and compute seconds.

        None when the creditor's time budget is used up: the step is over there, and nothing was written.
        Raises InvalidMessage, StaleEpoch and CorruptedKv as well."""
        if self._run(self._library.kv_take) == _FULL:
            return None
        return self._output, self._lse, self._asking.compute_s

    def give_up(self) -> None:
        """Give up the rest of the step."""
        self._run(self._library.kv_give_up)

    def stop(self) -> None:
        """End the exchange: messages follow."""
        self._run(self._library.kv_stop)

    def _run(self, function: Callable[[_Asking], int]) -> int:
        answers: list[int] = []

        def use(descriptor: int, ahead: memoryview) -> int:
            if ahead:
                raise InvalidMessage("the creditor sent an answer without a request")
            self._asking.fd = descriptor
            answers.append(function(self._asking))
            return 0

        self._pipe.lend(use)
        if answers[0] != _FULL:
            _check(answers[0])
        return answers[0]


_ERRORS: dict[int, tuple[type[KvasirError], str]] = {
    _LATE: (DeadlineExceeded, "the peer did not answer on the bulk plane in time"),
    _LOST: (PeerLost, "the link to the peer broke"),
    _MANGLED: (InvalidMessage, "a layer's request or answer was corrupted in transit"),
    _STALE: (StaleEpoch, "none of these grants covers the blocks: borrow again"),
    _CORRUPTED: (CorruptedKv, "the creditor's block is not what was written to it"),
}


def _check(answer: int) -> None:
    if answer:
        refused = f"the creditor's operator refused a layer: {answer} (see attention.h)"
        error, message = _ERRORS.get(answer, (InternalError, refused))
        raise error(message)
