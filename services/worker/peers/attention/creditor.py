"""The creditor: attends to, writes and reads lent blocks for other workers' engines.

It runs on the threads that serve links, beside the worker's own steps, with which it shares only the
processor. One request computes at a time, for device and host memory. Every block is verified when it is read
or written to (`memory`): a changed block is an error. Source: Infinite-LLM §4.2 and §4.6 (papers/001).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.engine.spans import PackedSpans
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.interfaces import Brought, LentBlocks, Turn
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
)
from services.worker.peers.lending.core.grants import Freed, Grants
from services.worker.peers.transport.base import Buffer, Peer, Receiver, Reception, Reply, bytes_of
from services.worker.peers.transport.pipe import Pipe
from shared.clock import Clock, monotonic_s
from shared.errors import CorruptedKv, InvalidMessage, StaleEpoch
from shared.log import get_logger
from shared.messages.base import decode
from shared.messages.lending import KvTier
from shared.metrics import counter

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

Prepared = tuple[Callable[[], Reply], Sequence[Buffer]]
"""The action once a request has arrived, and the memory for its buffers."""


class LentGrants:
    """Access control by this worker's grants, for every message, on the threads that serve links.

    `on_freed` gets blocks that their last user leaves. Source: `algorithms.md` §4 (fencing)."""

    def __init__(self, grants: Grants, on_freed: Callable[[Freed], None], clock: Clock = monotonic_s) -> None:
        self._grants = grants
        self._on_freed = on_freed
        self._clock = clock

    def enter(self, debtor: Peer, grants: Sequence[GrantRef]) -> tuple[GrantRef, ...] | None:
        """Return the grants with their generations now, and protect their blocks until `leave`, which must
        follow. None when a grant is not this debtor's or has ended."""
        entered: list[GrantRef] = []
        for ref in grants:
            generation = self._grants.enter(debtor, ref.grant_id, ref.generation, self._clock())
            if generation is None:
                self.leave(entered)
                return None
            entered.append(GrantRef(ref.grant_id, generation))
        return tuple(entered)

    def leave(self, grants: Sequence[GrantRef]) -> None:
        """End a successful `enter`."""
        for ref in grants:
            freed = self._grants.leave(ref.grant_id)
            if freed is not None:
                self._on_freed(freed)

    def lent(self, grants: Sequence[GrantRef], tier: KvTier) -> npt.NDArray[np.int64]:
        """Return, by block of the tier, which of these entered grants it belongs to, or 0."""
        return self._grants.lent_under(tier, [ref.grant_id for ref in grants])

    def loans(
        self, grants: Sequence[GrantRef], tier: KvTier, blocks: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64] | None:
        """Return the grant of each block among these entered ones; None when one belongs to none.

        The answer holds while the generations stay the same."""
        return self._grants.grants_of(tier, blocks, [ref.grant_id for ref in grants])


@dataclass(slots=True)
class _Known:
    """A described part, and the grants that covered its blocks at the last check."""

    described: Described
    checked: tuple[GrantRef, ...] | None = None


class Creditor:
    """Serves one worker's lent blocks. `receivers` are for its bulk desk.

    `is_busy`: whether its engine has steps to run; `host`: its lent host memory."""

    def __init__(
        self,
        device: LentBlocks,
        grants: LentGrants,
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
        self._block_tokens = block_tokens
        self._grants = grants
        self.budget = budget
        self._clock = clock
        self._is_busy = is_busy
        self._computing = threading.Lock()
        self.corrupted_blocks = 0
        """Number of blocks found since the start whose bytes had changed."""
        self._described: dict[tuple[Peer, KvTier], OrderedDict[int, _Known]] = {}
        self._lock = threading.Lock()
        self.receivers: dict[str, Receiver] = {
            ATTEND: partial(self._admit, self._written),
            NATIVE: self._announced,
            WRITE: partial(self._admit, self._written),
            FETCH: partial(self._admit, self._fetch),
        }

    def keep(self, debtors: Collection[str]) -> None:
        """Forget the descriptions of all other debtors: they have no grants."""
        with self._lock:
            for key in [key for key in self._described if key[0].worker_id not in debtors]:
                del self._described[key]

    def _admit(
        self,
        make: Callable[[LentBlocks, Request, Described, Sequence[int]], Prepared],
        peer: Peer,
        header: bytes,
        sizes_bytes: Sequence[int],
    ) -> Reception:
        """Protect the request's blocks until it is processed.

        Raises InvalidMessage, or StaleEpoch when a grant is not the debtor's."""
        request = decode(header, Request)
        memory = self._memory_of(request)
        if not 0 <= request.layer < memory.layers:
            raise InvalidMessage(f"layer {request.layer} of {memory.layers}")
        now = self._grants.enter(peer, request.grants)
        if now is None:
            raise StaleEpoch("a grant was revoked, has expired or was never yours: borrow again")
        try:
            described = self._understand(memory, peer, request, now)
            work, buffers = make(memory, request, described, sizes_bytes)
        except BaseException:
            self._grants.leave(request.grants)
            raise

        def commit() -> Reply:
            with self._accessing(peer, request.tier, request.grants):
                return work()

        return Reception(commit, partial(self._grants.leave, request.grants), buffers)

    @contextmanager
    def _accessing(self, peer: Peer, tier: KvTier, grants: Sequence[GrantRef]) -> Iterator[None]:
        """Wrap access to blocks of entered grants, then leave them. Counts and logs CorruptedKv."""
        try:
            yield
        except CorruptedKv as error:
            _corrupted.inc()
            self.corrupted_blocks += 1
            what = "block %d of lent %s memory differs from what %s wrote: dropped"
            _log.error(what, error.block, tier, peer.worker_id)
            raise
        finally:
            self._grants.leave(grants)

    def _memory_of(self, request: Request) -> LentBlocks:
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
            known = _Known(from_wire(request.part, self._block_tokens))
        else:
            with self._lock:
                steps = self._described.get(key)
                found = None if steps is None else steps.get(request.step)
            if found is None:
                raise InvalidMessage(f"step {request.step} was never described, or was forgotten")
            known = found
        if known.checked != now:
            blocks = known.described.spans.blocks
            loans = self._grants.loans(now, request.tier, blocks)
            if loans is None:
                raise StaleEpoch("none of these grants covers the blocks: borrow again")
            with self._computing:
                memory.adopt(blocks, loans)
            known.checked = now
        if request.part is not None and request.step != NO_STEP:
            with self._lock:
                steps = self._described.setdefault(key, OrderedDict())
                steps[request.step] = known
                while len(steps) > _STEPS_KEPT:
                    steps.popitem(last=False)
        return known.described

    # --- messages about a part

    def _written(
        self, memory: LentBlocks, asked: Request, described: Described, sizes_bytes: Sequence[int]
    ) -> Prepared:
        """Take a `kv.attend`: write, then attend if there are queries. A `kv.write` has none."""
        if not 0 <= asked.q_heads <= _MAX_Q_HEADS:
            raise InvalidMessage(f"{asked.q_heads} query heads")
        expected = memory.sizes_bytes(asked, described.rows, len(described.kept))
        if list(sizes_bytes) != expected or sum(expected) > _MAX_BUFFER_BYTES:
            raise InvalidMessage(f"buffers of {list(sizes_bytes)} bytes where {expected} are due")
        brought = [np.empty(size, dtype=np.uint8) for size in expected]

        def write() -> Reply:
            with self._computing:
                if len(described.kept):
                    memory.write(asked, brought, described.kept_slots)
                return self._attend(memory, asked, described.spans, brought) if asked.q_heads else Reply()

        return write, [bytes_of(each) for each in brought]

    def _attend(self, memory: LentBlocks, asked: Request, spans: PackedSpans, brought: Brought) -> Reply:
        is_busy, began_s = self._is_busy(), self._clock()
        if not memory.attends or not self.budget.may_compute(began_s, is_busy=is_busy):
            return Reply(msgspec.msgpack.encode(Attended(over_budget=True)))
        found = memory.attend(asked, spans, brought)
        compute_s = self._clock() - began_s + memory.served_s(spans, is_busy=is_busy)
        self.budget.on_computed(compute_s, is_busy=is_busy)
        return Reply(msgspec.msgpack.encode(Attended(compute_s=compute_s)), found)

    def _fetch(
        self, memory: LentBlocks, request: Request, described: Described, sizes_bytes: Sequence[int]
    ) -> Prepared:
        """Take a `kv.fetch` of blocks of one layer, which may bring keys and values of another layer."""
        blocks, whole = described.spans.blocks, len(request.indices) // 4 * 4
        indices = np.frombuffer(request.indices[:whole], dtype=np.int32)
        is_odd = whole < len(request.indices) or not len(indices)
        if is_odd or indices.min() < 0 or indices.max() >= len(blocks):
            raise InvalidMessage("a fetch names blocks of its part")
        if request.write_layer >= memory.layers or (sizes_bytes and request.write_layer < 0):
            raise InvalidMessage(f"keys and values for layer {request.write_layer}")
        write: Callable[[], object] | None = None
        buffers: Sequence[Buffer] = ()
        if sizes_bytes:
            written = msgspec.structs.replace(request, layer=request.write_layer, q_heads=0)
            write, buffers = self._written(memory, written, described, sizes_bytes)

        def fetch() -> Reply:
            """Reply with a copy, so that the grant may end while it is sent."""
            if write is not None:
                write()
            found = memory.copy(request.layer, blocks[indices])
            with self._computing:
                memory.verify(request.layer, blocks[indices])
            return Reply(b"", found)

        return fetch, buffers

    # --- native steps

    def _announced(self, peer: Peer, header: bytes, sizes_bytes: Sequence[int]) -> Reception:
        """Receiver of `kv.native`: the debtor's steps follow natively, until it ends the exchange."""
        request = decode(header, Request)
        memory = self._memory_of(request)
        if not 0 < request.q_heads <= _MAX_Q_HEADS:
            raise InvalidMessage(f"{request.q_heads} query heads")
        for layer in range(memory.layers):
            memory.sizes_bytes(msgspec.structs.replace(request, layer=layer), 0, 0)
        if sizes_bytes:
            raise InvalidMessage("an announcement of an exchange carries no buffers")

        def commit() -> Reply:
            if not memory.is_native or not memory.attends:
                return Reply(msgspec.msgpack.encode(Attended()))
            if not self.budget.may_compute(self._clock(), is_busy=self._is_busy()):
                return Reply(msgspec.msgpack.encode(Attended(over_budget=True)))
            native = msgspec.msgpack.encode(Attended(is_native=True))
            return Reply(native, sequel=partial(self._exchange, memory, peer, request))

        return Reception(commit)

    def _exchange(self, memory: LentBlocks, peer: Peer, request: Request, pipe: Pipe) -> None:
        while not self._turn(memory, peer, request, pipe).is_over:
            pipe.wait(monotonic_s() + _IDLE_S)

    def _turn(self, memory: LentBlocks, peer: Peer, request: Request, pipe: Pipe) -> Turn:
        """Enter the grants for a turn of 50 ms. Blocks that are returned, or whose lease ends, stay reserved
        until it is over, and are refused afterwards."""
        now = self._grants.enter(peer, request.grants) or ()
        with self._accessing(peer, request.tier, now):
            loans = self._grants.lent(now, request.tier)
            lent = np.flatnonzero(loans).astype(np.int32)
            with self._computing:
                memory.adopt(lent, loans[lent])
            is_full = not self.budget.may_compute(self._clock(), is_busy=self._is_busy())
            turn = memory.serve(pipe, loans != 0, q_heads=request.q_heads, is_full=is_full)
            self.budget.on_computed(turn.compute_s, is_busy=self._is_busy())
            return turn
