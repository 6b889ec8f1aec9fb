"""The creditor: attends to, writes and reads lent blocks for other workers' engines.

It runs on the threads that serve links, beside the worker's own steps. No local sequence uses lent blocks,
so the two share only the processor, of which a budget is lent. One request computes at a time, by the same
operator for device and host memory. Every block is verified when it is read or written to (`seals`): a
changed block is an error. Knows grants and pools; no sequence, no bus. Source: Infinite-LLM §4.2 and §4.6
(papers/001).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.interfaces import LentBlocks, Question, Turn
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    NATIVE,
    NO_STEP,
    WRITE,
    Attended,
    Described,
    GrantRef,
    Request,
    from_wire,
    read_request,
)
from services.worker.peers.lending.core.grants import Freed, Grants
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reply, bytes_of
from services.worker.peers.transport.pipe import Pipe
from shared.clock import Clock, monotonic_s
from shared.errors import CorruptedKv, InvalidMessage, StaleEpoch
from shared.log import get_logger
from shared.messages.lending import KvTier
from shared.metrics import counter


class AccessGrants(Protocol):
    """Access control, called for every message on the threads that serve links."""

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        """Return the grants with their generations now, and protect their blocks until `leave`, which must
        follow. None when a grant is not this debtor's or has ended."""
        ...

    def leave(self, debtor: Peer, grants: Sequence[GrantRef]) -> None:
        """End a successful `enter`."""
        ...

    def lent(self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier) -> npt.NDArray[np.int64]:
        """Return, by block of the tier, which of these entered grants it belongs to, or 0."""
        ...

    def loans(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64] | None:
        """Return the grant of each block among these entered ones; None when one belongs to none.

        The answer holds while the generations stay the same."""
        ...


class LentGrants:
    """`AccessGrants` by this worker's grants. `on_freed` gets blocks that their last user leaves, on a link's
    thread. Source: `algorithms.md` §4 (fencing)."""

    def __init__(
        self,
        grants: Grants,
        table: RBlockTable,
        on_freed: Callable[[Freed], None],
        clock: Clock = monotonic_s,
    ) -> None:
        self._grants = grants
        self._table = table
        self._on_freed = on_freed
        self._clock = clock

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        entered: list[GrantRef] = []
        with self._grants.lock:
            for ref in grants:
                generation = self._grants.generation_for((debtor.worker_id, debtor.incarnation), ref.grant_id)
                if generation is None or not self._grants.enter(
                    ref.grant_id, ref.generation, (), self._clock()
                ):
                    break
                entered.append(GrantRef(ref.grant_id, generation))
        if len(entered) < len(grants):
            self.leave(debtor, entered)
            return None
        return tuple(entered)

    def leave(self, debtor: Peer, grants: Sequence[GrantRef]) -> None:
        for ref in grants:
            freed = self._grants.leave(ref.grant_id)
            if freed is not None:
                self._on_freed(freed)

    def lent(self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier) -> npt.NDArray[np.int64]:
        with self._grants.lock:
            return self._table.lent_under(tier, [ref.grant_id for ref in grants])

    def loans(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64] | None:
        with self._grants.lock:
            return self._table.grants_of(tier, blocks, [ref.grant_id for ref in grants])


_log = get_logger("worker.creditor")
_corrupted = counter(
    "kvasir_worker_lent_blocks_corrupted_total", "Lent blocks whose bytes had changed when they were read."
)
_STEPS_KEPT = 4
"""Number of latest step descriptions kept per debtor."""
_IDLE_S = 600.0
"""A link without a request for this long is closed."""
_MAX_Q_HEADS = 4096
_MAX_BUFFER_BYTES = 1 << 30


class Creditor:
    """Serves one worker's lent blocks. `receivers` are for its bulk desk.

    `is_busy`: whether its engine has steps to run; `host`: its lent host memory."""

    def __init__(
        self,
        device: LentBlocks,
        grants: AccessGrants,
        budget: ComputeBudget,
        *,
        block_tokens: int,
        clock: Clock = time.monotonic,
        is_busy: Callable[[], bool] = lambda: False,
        host: LentBlocks | None = None,
    ) -> None:
        self._memory = {KvTier.DEVICE: device}
        if host is not None:
            self._memory[KvTier.HOST] = host
        self.block_tokens = block_tokens
        self.grants = grants
        self.budget = budget
        self.clock = clock
        self.is_busy = is_busy
        self.computing = threading.Lock()
        self.corrupted_blocks = 0
        """Number of blocks found since the start whose bytes had changed."""
        self._described: dict[tuple[Peer, KvTier], OrderedDict[int, _Known]] = {}
        self._lock = threading.Lock()
        self.receivers: dict[str, Receiver] = {
            ATTEND: partial(self._admit, _asked),
            NATIVE: self._announced,
            WRITE: partial(self._admit, _asked),
            FETCH: partial(self._admit, _Fetch),
        }

    def enter(self, peer: Peer, header: bytes) -> "Visit":
        """Return a visit for a request and its part; it must be left.

        Raises InvalidMessage, or StaleEpoch when a grant is not the debtor's."""
        request = read_request(header)
        memory = self.memory_of(request)
        if not 0 <= request.layer < memory.layers:
            raise InvalidMessage(f"layer {request.layer} of {memory.layers}")
        now = self.grants.enter(peer, request.grants)
        if now is None:
            raise StaleEpoch("a grant was revoked, has expired or was never yours: borrow again")
        try:
            return Visit(self, memory, peer, request, self._understand(memory, peer, request, now))
        except BaseException:
            self.grants.leave(peer, request.grants)
            raise

    def _admit(
        self,
        make: "Callable[[Visit, Sequence[int]], _Question | _Fetch]",
        peer: Peer,
        header: bytes,
        sizes_bytes: Sequence[int],
    ) -> "_Question | _Fetch":
        visit = self.enter(peer, header)
        try:
            return make(visit, sizes_bytes)
        except BaseException:
            visit.leave()
            raise

    def _announced(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Exchange":
        """Receiver of `kv.native`: the debtor's steps follow natively, until it ends the exchange."""
        request = read_request(header)
        memory = self.memory_of(request)
        if not 0 < request.q_heads <= _MAX_Q_HEADS:
            raise InvalidMessage(f"{request.q_heads} query heads")
        for layer in range(memory.layers):
            memory.sizes_bytes(Question(layer, request.q_heads), 0, 0)
        if sizes_bytes:
            raise InvalidMessage("an announcement of an exchange carries no buffers")
        return _Exchange(self, memory, peer, request)

    def memory_of(self, request: Request) -> LentBlocks:
        """Return the memory of the request's tier. Raises InvalidMessage when none is lent."""
        memory = self._memory.get(request.tier)
        if memory is None:
            raise InvalidMessage(f"this worker lends no {request.tier} memory")
        return memory

    def _understand(
        self, memory: LentBlocks, peer: Peer, request: Request, now: tuple[GrantRef, ...]
    ) -> Described:
        """Return the request's part, after checking that these grants cover all of its blocks."""
        key = peer, request.tier
        if request.part is not None:
            known = _Known(from_wire(request.part, self.block_tokens))
        else:
            with self._lock:
                steps = self._described.get(key)
                found = None if steps is None else steps.get(request.step)
            if found is None:
                raise InvalidMessage(f"step {request.step} was never described, or was forgotten")
            known = found
        if known.checked != now:
            blocks = known.described.spans.blocks
            loans = self.grants.loans(peer, now, request.tier, blocks)
            if loans is None:
                raise StaleEpoch("none of these grants covers the blocks: borrow again")
            with self.computing:
                memory.adopt(blocks, loans)
            known.checked = now
        if request.part is not None and request.step != NO_STEP:
            with self._lock:
                steps = self._described.setdefault(key, OrderedDict())
                steps[request.step] = known
                while len(steps) > _STEPS_KEPT:
                    steps.popitem(last=False)
        return known.described

    def drop(self, peer: Peer, tier: KvTier, error: CorruptedKv) -> None:
        """Count and log a block whose bytes have changed."""
        _corrupted.inc()
        self.corrupted_blocks += 1
        _log.error(
            "block %d of lent %s memory differs from what %s wrote: dropped",
            error.block,
            tier,
            peer.worker_id,
        )

    def keep(self, debtors: Collection[str]) -> None:
        """Forget the descriptions of all other debtors: they have no grants."""
        with self._lock:
            for key in [key for key in self._described if key[0].worker_id not in debtors]:
                del self._described[key]


@dataclass(slots=True)
class _Known:
    """A described part, and the grants that covered its blocks at the last check."""

    described: Described
    checked: tuple[GrantRef, ...] | None = None


@dataclass(slots=True)
class Visit:
    """One message of a debtor in progress."""

    creditor: Creditor
    memory: LentBlocks
    peer: Peer
    request: Request
    described: Described
    is_over: bool = False

    @contextmanager
    def worked_on(self) -> Iterator[None]:
        """Wrap access to blocks, then leave the visit. Records CorruptedKv with the creditor."""
        try:
            yield
        except CorruptedKv as error:
            self.creditor.drop(self.peer, self.request.tier, error)
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Release the visit's blocks. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self.creditor.grants.leave(self.peer, self.request.grants)


def _asked(visit: Visit, sizes_bytes: Sequence[int]) -> "_Question":
    """Make a request of `kv.attend`, or of `kv.write`, which is the same without queries."""
    return _Question(visit, visit.request.layer, visit.request.q_heads, sizes_bytes)


class _Question:
    """A request about one layer of a step's part."""

    def __init__(self, visit: Visit, layer: int, q_heads: int, sizes_bytes: Sequence[int]) -> None:
        self._visit = visit
        request, described = visit.request, visit.described
        if not 0 <= q_heads <= _MAX_Q_HEADS:
            raise InvalidMessage(f"{q_heads} query heads")
        self._asked = Question(layer, q_heads, request.scaling, request.softcap)
        expected = visit.memory.sizes_bytes(self._asked, described.rows, len(described.kept))
        if list(sizes_bytes) != expected or sum(expected) > _MAX_BUFFER_BYTES:
            raise InvalidMessage(f"buffers of {list(sizes_bytes)} bytes where {expected} are due")
        self._brought = [np.empty(size, dtype=np.uint8) for size in expected]
        self.buffers: Sequence[Buffer] = [bytes_of(each) for each in self._brought]

    def commit(self) -> Reply:
        with self._visit.worked_on():
            return self.run()

    def abandon(self) -> None:
        self._visit.leave()

    def run(self) -> Reply:
        """Write, then attend if there are queries."""
        described = self._visit.described
        with self._visit.creditor.computing:
            if len(described.kept):
                self._visit.memory.write(self._asked, self._brought, described.kept_slots)
            return self._attend() if self._asked.q_heads else Reply()

    def _attend(self) -> Reply:
        creditor, memory, spans = self._visit.creditor, self._visit.memory, self._visit.described.spans
        is_busy, began_s = creditor.is_busy(), creditor.clock()
        if not memory.attends or not creditor.budget.may_compute(began_s, is_busy=is_busy):
            return Reply(msgspec.msgpack.encode(Attended(over_budget=True)))
        found = memory.attend(self._asked, spans, self._brought)
        compute_s = creditor.clock() - began_s + memory.served_s(spans, is_busy=is_busy)
        creditor.budget.on_computed(compute_s, is_busy=is_busy)
        return Reply(msgspec.msgpack.encode(Attended(compute_s=compute_s)), found)


@dataclass(slots=True)
class _Exchange:
    """A reply and the exchange that follows it (`Sequel`).

    Its grants are entered for turns of 50 ms. Blocks that are returned, or whose lease ends, stay reserved
    until the turn is over, and are refused afterwards."""

    creditor: Creditor
    memory: LentBlocks
    peer: Peer
    request: Request
    buffers: Sequence[Buffer] = ()

    def commit(self) -> Reply:
        creditor = self.creditor
        if not self.memory.is_native or not self.memory.attends:
            return Reply(msgspec.msgpack.encode(Attended()))
        if not creditor.budget.may_compute(creditor.clock(), is_busy=creditor.is_busy()):
            return Reply(msgspec.msgpack.encode(Attended(over_budget=True)))
        return Reply(msgspec.msgpack.encode(Attended(is_native=True)), sequel=self)

    def run(self, pipe: Pipe) -> None:
        while not self._turn(pipe).is_over:
            pipe.wait(monotonic_s() + _IDLE_S)

    def _turn(self, pipe: Pipe) -> Turn:
        creditor, memory, request = self.creditor, self.memory, self.request
        now = creditor.grants.enter(self.peer, request.grants)
        try:
            loans = creditor.grants.lent(self.peer, now or (), request.tier)
            lent = np.flatnonzero(loans).astype(np.int32)
            with creditor.computing:
                memory.adopt(lent, loans[lent])
            is_full = not creditor.budget.may_compute(creditor.clock(), is_busy=creditor.is_busy())
            turn = memory.serve(pipe, loans != 0, q_heads=request.q_heads, is_full=is_full)
            creditor.budget.on_computed(turn.compute_s, is_busy=creditor.is_busy())
            return turn
        except CorruptedKv as error:
            creditor.drop(self.peer, request.tier, error)
            raise
        finally:
            if now is not None:
                creditor.grants.leave(self.peer, request.grants)

    def abandon(self) -> None:
        """Nothing to release."""


class _Fetch:
    """A `kv.fetch` of blocks of one layer, which may bring keys and values of another layer."""

    def __init__(self, visit: Visit, sizes_bytes: Sequence[int]) -> None:
        request, blocks = visit.request, visit.described.spans.blocks
        whole = len(request.indices) // 4 * 4
        indices = np.frombuffer(request.indices[:whole], dtype=np.int32)
        if (
            whole < len(request.indices)
            or not len(indices)
            or indices.min() < 0
            or indices.max() >= len(blocks)
        ):
            raise InvalidMessage("a fetch names blocks of its part")
        if request.write_layer >= visit.memory.layers or (sizes_bytes and request.write_layer < 0):
            raise InvalidMessage(f"keys and values for layer {request.write_layer}")
        self._visit, self._blocks = visit, blocks[indices]
        self._write = _Question(visit, request.write_layer, 0, sizes_bytes) if sizes_bytes else None
        self.buffers: Sequence[Buffer] = () if self._write is None else self._write.buffers

    def commit(self) -> Reply:
        """Reply with a copy, so that the grant may end while it is sent."""
        visit, layer = self._visit, self._visit.request.layer
        with visit.worked_on():
            if self._write is not None:
                self._write.run()
            found = visit.memory.copy(layer, self._blocks)
            with visit.creditor.computing:
                visit.memory.verify(layer, self._blocks)
        return Reply(b"", found)

    def abandon(self) -> None:
        self._visit.leave()
