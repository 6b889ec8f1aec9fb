"""Assembles a worker's lending, distributed attention and cache loans, and computes its maximum context.

An engine that cannot attend to a part of the keys (vLLM) borrows nothing for sequences and lends host memory
only."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from services.worker.config import WorkerConfig
from services.worker.core.settings import LendingConfig
from services.worker.door import Door
from services.worker.engine.contract import AttendingEngine, Engine, SharingEngine, TokenEngine
from services.worker.kv.core.borrowed_pool import ExtendedPool, OwnPool, Pool
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.kv.transfers import TransferEngine
from services.worker.peers import registry as peers
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.interfaces import BlockDebtor, LentBlocks
from services.worker.peers.attention.tokens import TokenDebtor, TokenMemory
from services.worker.peers.core.neighbours import LinkRates
from services.worker.peers.keeping.loans import CacheLoans, Keeper, PeerWays, lent_records
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.debtor import Owner
from services.worker.peers.lending.service import Lending
from services.worker.peers.registry import Registry
from shared import subjects
from shared.bus import Bus, Handler, Listener
from shared.clock import Clock
from shared.errors import CreditorLost
from shared.liveness import Start
from shared.messages.commands import WantKv
from shared.messages.reports import Capacity

HANDLERS: tuple[Handler, ...] = (Listener(subjects.worker_want, WantKv, "on_want"),)
_WANT_S = 2.0
"""Seconds after which a `WantKv` expires; the scheduler repeats it more often."""
_HOLD_S = 30.0


class Reach:
    """The maximum context that a worker announces: its own and lendable KV, up to the model's limit. It does
    not fall for 30 s, so that no request is refused while a neighbour restarts."""

    def __init__(self, own_tokens: int, max_tokens: int) -> None:
        """`max_tokens`: the model's limit."""
        self._own_tokens = own_tokens
        self._max_tokens = max_tokens
        self._held = (0, 0.0)

    def context_tokens(self, lendable_tokens: int, now_s: float) -> int:
        """Return the maximum tokens of prompt and answer, with `lendable_tokens` of all other workers."""
        now_tokens = self._own_tokens + lendable_tokens
        held_tokens, until_s = self._held
        if now_tokens >= held_tokens or now_s >= until_s:
            held_tokens = now_tokens
            self._held = (now_tokens, now_s + _HOLD_S)
        return min(self._max_tokens, held_tokens)


def extended(config: LendingConfig, engine: Engine, own: OwnPool) -> OwnPool | ExtendedPool:
    """Return the pool for sequences: the worker's own, extended by borrowed blocks if it borrows."""
    if not possible(config, engine).borrow or not isinstance(engine, SharingEngine):
        return own
    return ExtendedPool(own, engine.own_ids)


def possible(config: LendingConfig, engine: Engine) -> LendingConfig:
    """Return the settings without the parts that the engine does not support."""
    if isinstance(engine, SharingEngine) and engine.is_divisible:
        pie = engine.pie if isinstance(engine, AttendingEngine) else None
        most = 1.0 if pie is None else pie.lendable_share
        return config.model_copy(update={"max_lent_fraction": min(config.max_lent_fraction, most)})
    is_copied = isinstance(engine, CacheableEngine)
    allowed = {"max_lent_fraction": 0.0} if is_copied else {"lend": False}
    return config.model_copy(update={"borrow": False, **allowed})


def debtor_of(engine: SharingEngine, config: LendingConfig, rates: LinkRates, clock: Clock) -> BlockDebtor:
    """Return the engine's access to blocks of other workers. Raises ConfigError where parts of attention
    cannot be joined."""
    if isinstance(engine, TokenEngine):
        return TokenDebtor(engine, most_creditors=config.most_creditors, deadline_s=config.answer_s)
    from services.worker.peers.attention.debtor import AttendingDebtor  # Needs torch.

    assert isinstance(engine, AttendingEngine)
    return AttendingDebtor(
        engine.attention,
        q_heads=engine.q_heads,
        own_blocks=engine.own_ids,
        block_tokens=engine.block_tokens,
        staging_blocks=config.staging_blocks,
        most_creditors=config.most_creditors,
        deadline_s=config.answer_s,
        rates=rates,
        link_bytes_per_s=config.link_bytes_per_s,
        clock=clock,
    )


def lent_memory(
    engine: SharingEngine, config: LendingConfig, host_blocks: int
) -> tuple[LentBlocks, LentBlocks | None]:
    """Return the device's memory for other workers, and `host_blocks` of host memory; None without any."""
    attends = config.host_attention.attends(engine.device_type)
    if isinstance(engine, TokenEngine):
        tokens = np.zeros((host_blocks, engine.block_tokens), dtype=engine.tokens.dtype)
        host = TokenMemory(tokens, engine, attends) if host_blocks else None
        return TokenMemory(engine.tokens, engine), host
    from services.worker.peers.attention.memory import device_memory, host_memory  # Needs torch.

    assert isinstance(engine, AttendingEngine)
    device = device_memory(engine.attention)
    return device, host_memory(engine.attention, host_blocks, attends=attends) if host_blocks else None


class Neighbourhood:
    """The creditor and debtor sides of one worker."""

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        engine: Engine,
        own: OwnPool,
        pool: Pool,
        door: Door,
        registry: Registry,
        transfers: TransferEngine,
        *,
        store: KvStore | None = None,
        clock: Clock,
    ) -> None:
        """`own`: the engine's blocks; `pool`: the result of `extended`. Raises ConfigError if `borrow` is not
        possible or the lent memory is smaller than a block."""
        self._bus = bus
        self._model = config.served_name
        self._engine = engine
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._registry = registry
        self._want = WantKv(tokens=0)
        self._want_until_s = 0.0
        settings = possible(config.lending, engine)
        bounce_blocks = settings.bounce_blocks if settings.borrow is True else 0
        pie = engine.pie if isinstance(engine, AttendingEngine) else None
        self._pie, self._door = pie, door
        self._own_blocks = (engine.kv_blocks if pie is None else pie.most_blocks) - bounce_blocks
        own_tokens = self._own_blocks * engine.block_tokens
        self._reach = Reach(own_tokens, engine.max_positions)
        self.borrower: Borrower | None = None
        """None if the worker does not borrow."""
        self._creditor: Creditor | None = None
        lent_blocks = 0
        device: LentBlocks | None = None
        host: LentBlocks | None = None
        if settings.lend and isinstance(engine, SharingEngine | CacheableEngine):
            block_bytes = sum(int(pool[0].nbytes) for layer in engine.pools for pool in layer)
            lent_blocks = config.lent_blocks(block_bytes)
        if isinstance(engine, SharingEngine) and engine.is_divisible:
            if settings.lend:
                device, host = lent_memory(engine, settings, lent_blocks)
            if isinstance(pool, ExtendedPool):
                debtor = debtor_of(engine, settings, registry.rates, clock)
                parts = door, registry, engine.pools, transfers
                self.borrower = Borrower(debtor, pool, *parts, self._on_failed)
        kept = None
        if lent_blocks and isinstance(engine, CacheableEngine):
            kept = lent_records(engine, lent_blocks, host)
        owner = Owner(
            worker_id=bus.instance,
            incarnation=bus.incarnation,
            blocks=engine.kv_blocks,
            ids=engine.own_ids if isinstance(engine, SharingEngine) else engine.kv_blocks,
            block_tokens=engine.block_tokens,
            fingerprint=engine.fingerprint if isinstance(engine, CacheableEngine) else b"",
            host=registry.host,
            host_blocks=0 if kept is None else lent_blocks,
            host_attends=host is not None and host.attends,
            is_host_for_caches=kept is not None and host is None,
        )
        requests = itertools.count(1)
        self._lending = Lending(
            bus, settings, owner, door, own, registry.neighbours, requests, clock, borrower=self.borrower
        )
        grants = LentGrants(self._lending.grants, self._on_freed, clock)
        if kept is not None:
            registry.plane.desk.serve(Keeper(kept, grants).receivers)
        self._loans: CacheLoans | None = None
        """None if the prefix cache stores nothing at other workers."""
        if store is not None and store.peers is not None:
            ways = PeerWays(registry, self._loop, config.lending.answer_s, self._on_keeper_failed)
            of_cache = store, store.peers, door, ways
            self._loans = CacheLoans(bus, config.lending, owner, *of_cache, requests, clock)
        if device is not None:
            self._creditor = Creditor(
                device,
                grants,
                ComputeBudget(settings.max_remote_attention_fraction),
                block_tokens=engine.block_tokens,
                clock=clock,
                is_busy=lambda: door.core.has_plans,
                host=host,
            )
            registry.plane.desk.serve(self._creditor.receivers)

    def lost_blocks(self, error: CreditorLost) -> set[int]:
        """See `Runner`; on the engine's thread."""
        return set() if self.borrower is None else self.borrower.lose_creditor(error)

    async def listen(self) -> None:
        """Attach the handlers; call this before the first heartbeat, which announces the addresses."""
        await self._bus.attach(self._handlers, self)
        await self._bus.attach(peers.HANDLERS, self._registry)

    async def serve(self) -> None:
        """Serve until cancelled; call `listen` first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._registry.watch())
                tasks.create_task(self._lending.serve())
                if self._loans is not None:
                    tasks.create_task(self._loans.serve())
        finally:
            await self._bus.detach(self._handlers, self)
            await self._bus.detach(peers.HANDLERS, self._registry)

    @property
    def _handlers(self) -> tuple[Handler, ...]:
        return HANDLERS if self.borrower is not None or self._pie is not None else ()

    def close(self) -> bool:
        """End all links after the engine's thread has ended. Return False if one took too long."""
        if self.borrower is not None:
            self.borrower.close()
        if self._loans is not None:
            self._loans.close()
        return self._registry.plane.close()

    def section(self, capacity: Capacity) -> dict[str, Any]:
        """Return the heartbeat fields about lent and borrowed blocks and the maximum context."""
        if self._creditor is not None:
            # Grants are made on this thread, so none is made between the two calls.
            self._creditor.keep(self._lending.grants.lent_to())
        now_s = self._clock()
        want = self._want if now_s < self._want_until_s else WantKv(tokens=0)
        needed_blocks = -(-want.tokens // self._engine.block_tokens) + 1 if want.tokens else 0
        if needed_blocks <= self._own_blocks:  # `on_want` expanded Pie for this.
            needed_blocks = 0
        self._lending.want(needed_blocks, may_borrow_ahead=want.may_borrow_ahead)
        told = {**self._lending.section(capacity), "bulk_addresses": dict(self._registry.plane.addresses)}
        if self._loans is not None:
            counts = Counter(told["host_borrowed_from_blocks"])
            counts.update(self._loans.section())
            told["host_borrowed_from_blocks"] = dict(counts)
        if self.borrower is not None:
            lendable_tokens = self._registry.neighbours.lendable_tokens(self._model)
            told["max_context_tokens"] = self._reach.context_tokens(lendable_tokens, now_s)
        return told

    def details(self) -> dict[str, object]:
        """Return the details for `python -m services status`."""
        told: dict[str, object] = {"bulk": ", ".join(self._registry.plane.addresses)}
        if self._creditor is not None:
            told["corrupted_lent_blocks"] = self._creditor.corrupted_blocks
        if self._loans is None:
            return {**told, **self._lending.details({})}
        return {**told, **self._lending.details(self._loans.section()), **self._loans.details()}

    def on_want(self, want: WantKv) -> None:
        self._want, self._want_until_s = want, self._clock() + _WANT_S
        if self._pie is not None and want.tokens:
            pie, blocks = self._pie, -(-want.tokens // self._engine.block_tokens) + 1
            self._door.post(lambda core, _: pie.demand(blocks))  # Own host memory is used first.

    def _on_failed(self, creditor_id: str) -> None:
        """Report a failed creditor to the event loop; called on the engine's thread."""
        self._on_loop(partial(self._lending.on_creditor_failed, creditor_id))

    def _on_keeper_failed(self, creditor: Start, grant_id: int | None) -> None:
        """Report a failed keeper of cache blocks to the event loop; called on a copy thread."""
        if self._loans is not None:
            self._on_loop(partial(self._loans.on_failed, creditor, grant_id))

    def _on_freed(self, freed: Freed) -> None:
        """Report freed blocks to the event loop; called on a link's thread."""
        self._on_loop(partial(self._lending.free_later, freed))

    def _on_loop(self, call: Callable[[], None]) -> None:
        """Schedule a call on the event loop, which may have ended already."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
