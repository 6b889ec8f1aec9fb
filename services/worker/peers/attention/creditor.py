"""The creditor: attends to lent blocks, writes and reads them, for other workers' engines.

Runs on the threads that serve links, beside the worker's own steps: lent blocks are no sequence's here, so
nothing is shared but the processor, and of that a budget is lent. One question is computed at a time. Blocks
in host memory are worked on like those on the device, by the same operator. Every block is verified when it
is read or written to (`seals`): one that has changed is an error, and no answer. Knows grants and pools; no
sequence, no bus. Source: Infinite-LLM §4.2 and §4.6 (papers/001).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Asked on the threads that serve links, for every message."""

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        """Their generations now, where each is this debtor's and lasts: then none of their blocks is given to
        anybody else until `leave`, which must follow. None where one is not."""
        ...

    def leave(self, debtor: Peer, grants: Sequence[GrantRef]) -> None:
        """After an `enter` that said yes."""
        ...

    def lent(self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier) -> npt.NDArray[np.int64]:
        """By block of the tier: to which of these grants (which were entered) it belongs still, or 0."""
        ...

    def loans(
        self, debtor: Peer, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64] | None:
        """To which of these grants (which were entered) each of the tier's blocks belongs still; None where
        one belongs to none. While their generations stay the same, so does the answer."""
        ...


class LentGrants:
    """`AccessGrants` by what this worker lends. `on_freed` is called on a link's thread, with what was
    returned while somebody was at work on it. Source: `algorithms.md` §4 (fencing)."""

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
"""Descriptions kept of one debtor: its latest steps."""
_IDLE_S = 600.0
"""A link on which nobody asks for longer is closed."""
_MAX_Q_HEADS = 4096
_MAX_BUFFER_BYTES = 1 << 30


class Creditor:
    """One worker's. `receivers` are for its bulk desk; `is_busy`: its own engine has steps to run; `host`:
    what it lends of host memory."""

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
        """Found since the start: their memory was not what had been written to it."""
        self._described: dict[tuple[Peer, KvTier], OrderedDict[int, _Known]] = {}
        self._lock = threading.Lock()
        self.receivers: dict[str, Receiver] = {
            ATTEND: _Questions(self),
            NATIVE: _Exchanges(self),
            WRITE: _Questions(self),
            FETCH: _Fetches(self),
        }

    def enter(self, peer: Peer, header: bytes) -> "Visit":
        """The question, and the part that it is about; the visit has to be left.

        Raises InvalidMessage; StaleEpoch when a grant is not the debtor's, or no longer.
        """
        request = read_request(header)
        memory = self.memory_of(request)
        if not 0 <= request.layer < memory.layers:
            raise InvalidMessage(f"layer {request.layer} of {memory.layers}")
        now = self.grants.enter(peer, request.grants)
        if now is None:
            raise StaleEpoch("a grant was revoked, has expired or was never yours: borrow anew")
        try:
            return Visit(self, memory, peer, request, self._understand(memory, peer, request, now))
        except BaseException:
            self.grants.leave(peer, request.grants)
            raise

    def memory_of(self, request: Request) -> LentBlocks:
        """Raises InvalidMessage where none of that tier is lent."""
        memory = self._memory.get(request.tier)
        if memory is None:
            raise InvalidMessage(f"this worker lends no {request.tier} memory")
        return memory

    def _understand(
        self, memory: LentBlocks, peer: Peer, request: Request, now: tuple[GrantRef, ...]
    ) -> Described:
        """The part, every block of which is lent under these grants, at these generations."""
        key = peer, request.tier
        if request.part is not None:
            known = _Known(from_wire(request.part, self.block_tokens))
        else:
            with self._lock:
                steps = self._described.get(key)
                found = None if steps is None else steps.get(request.step)
            if found is None:
                raise InvalidMessage(f"step {request.step} was never described, or is long over")
            known = found
        if known.checked != now:
            blocks = known.described.spans.blocks
            loans = self.grants.loans(peer, now, request.tier, blocks)
            if loans is None:
                raise StaleEpoch("blocks that none of these grants covers (any more): borrow anew")
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
        """Somebody's memory has changed: nothing is said of it but that."""
        _corrupted.inc()
        self.corrupted_blocks += 1
        _log.error(
            "block %d of lent %s memory is not what %s wrote to it: dropped",
            error.block,
            tier,
            peer.worker_id,
        )

    def keep(self, debtors: Collection[str]) -> None:
        """Forgets what anybody else described: who has no grant any more describes anew when there is one."""
        with self._lock:
            for key in [key for key in self._described if key[0].worker_id not in debtors]:
                del self._described[key]


@dataclass(slots=True)
class _Known:
    """A part that was described, and what its blocks were found to be lent under the last time."""

    described: Described
    checked: tuple[GrantRef, ...] | None = None


@dataclass(slots=True)
class Visit:
    """One message of a debtor while it is worked on."""

    creditor: Creditor
    memory: LentBlocks
    peer: Peer
    request: Request
    described: Described
    is_over: bool = False

    @contextmanager
    def worked_on(self) -> Iterator[None]:
        """For what touches blocks. Leaves the visit. Raises CorruptedKv, of which the creditor knows then."""
        try:
            yield
        except CorruptedKv as error:
            self.creditor.drop(self.peer, self.request.tier, error)
            raise
        finally:
            self.leave()

    def leave(self) -> None:
        """Its blocks may go to somebody else. Idempotent."""
        if not self.is_over:
            self.is_over = True
            self.creditor.grants.leave(self.peer, self.request.grants)


class _Questions:
    """`kv.attend` and `kv.write`: the second is the first without queries."""

    def __init__(self, creditor: Creditor) -> None:
        self._creditor = creditor

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Question":
        visit = self._creditor.enter(peer, header)
        try:
            return _Question(visit, visit.request.layer, visit.request.q_heads, sizes_bytes)
        except BaseException:
            visit.leave()
            raise


class _Question:
    """One layer of one step's part."""

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
        """Write, and attend where there are queries."""
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


class _Exchanges:
    """`kv.native`: from here on the debtor's steps come natively, until it ends that."""

    def __init__(self, creditor: Creditor) -> None:
        self._creditor = creditor

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Exchange":
        request = read_request(header)
        memory = self._creditor.memory_of(request)
        q_heads = request.q_heads
        if not 0 < q_heads <= _MAX_Q_HEADS:
            raise InvalidMessage(f"{q_heads} query heads")
        for layer in range(memory.layers):
            memory.sizes_bytes(Question(layer, q_heads), 0, 0)
        if sizes_bytes:
            raise InvalidMessage("an exchange is announced without buffers")
        return _Exchange(self._creditor, memory, peer, request)


@dataclass(slots=True)
class _Exchange:
    """A reply, and what follows it on the link (`Sequel`). Its grants are entered while steps are under way,
    and looked at again every 50 ms: blocks that were returned meanwhile, or whose lease has ended, are nobody
    else's before that, and no more the debtor's after it."""

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
        """See `Reception` and `Sequel`: nothing is held yet."""


class _Fetches:
    """`kv.fetch`."""

    def __init__(self, creditor: Creditor) -> None:
        self._creditor = creditor

    def admit(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> "_Fetch":
        visit = self._creditor.enter(peer, header)
        try:
            return _Fetch(visit, sizes_bytes)
        except BaseException:
            visit.leave()
            raise


class _Fetch:
    """Some blocks of one layer, after writing what came along for another."""

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
        """Copied: what is sent is of one moment, whatever happens to the grant meanwhile."""
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
