"""A worker among its neighbours: what it lends and borrows, its bulk plane, and the context it announces.

Puts lending, distributed attention and the bulk plane together. Decides nothing. Where the engine cannot
attend to parts of keys (a GPU, sliding windows, a peer's engine) the worker neither lends nor borrows; on a
GPU it lends host memory still.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from services.worker.config import WorkerConfig
from services.worker.engine.engine import Engine, TorchEngine
from services.worker.engine_thread import Runner
from services.worker.kv.core.borrowed_pool import ExtendedPool, OwnPool, Pool
from services.worker.peers.attention import plane
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor
from services.worker.peers.attention.debtor import Debtor
from services.worker.peers.attention.lent import LentGrants
from services.worker.peers.attention.memory import LentMemory, host_blocks, host_memory
from services.worker.peers.attention.plane import BulkPlane
from services.worker.peers.attention.staging import HALVES
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.core.interfaces import Owner
from services.worker.peers.lending.core.lendable_memory import LendablePool
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.lending.service import Lending
from services.worker.peers.lending.vault import PoolVault
from services.worker.peers.transport.base import PeerLink
from services.worker.peers.transport.settings import make_transports
from shared import subjects
from shared.bus import Bus, Handler, Listener
from shared.clock import Clock
from shared.errors import CreditorLost
from shared.messages.commands import WantKv
from shared.messages.reports import Capacity, WorkerReported
from shared.ttl_map import RecentMap

_HOLD_S = 30.0
_SILENCE_S = 5.0
_MOST_NEIGHBOURS = 4096


class Reach:
    """Of one worker among its neighbours."""

    def __init__(self, worker_id: str, model: str, own_tokens: int, max_tokens: int) -> None:
        """`max_tokens` is the model's own limit."""
        self._worker_id = worker_id
        self._model = model
        self._own_tokens = own_tokens
        self._max_tokens = max_tokens
        self._lendable_tokens: RecentMap[str, int] = RecentMap(_SILENCE_S, _MOST_NEIGHBOURS)
        self._held = (0, 0.0)

    def on_report(self, report: WorkerReported, now_s: float) -> None:
        """A heartbeat of any worker."""
        if report.worker_id != self._worker_id and report.model == self._model:
            tokens = report.capacity.most_lent_blocks * report.block_tokens
            self._lendable_tokens.put(report.worker_id, tokens, now_s)

    def context_tokens(self, now_s: float) -> int:
        """Prompt and answer."""
        self._lendable_tokens.expire(now_s)
        now_tokens = self._own_tokens + sum(tokens for _, tokens in self._lendable_tokens.items())
        held_tokens, until_s = self._held
        if now_tokens >= held_tokens or now_s >= until_s:
            held_tokens = now_tokens
            self._held = (now_tokens, now_s + _HOLD_S)
        return min(self._max_tokens, held_tokens)


HANDLERS: tuple[Handler, ...] = (Listener(subjects.worker_want, WantKv, "on_want"),)
_WANT_S = 2.0
"""The scheduler repeats what it wants several times within this."""


def staged_blocks(config: LendingConfig, layers: int) -> int:
    """What the stagings of all creditors take, in the worker's own KV blocks."""
    staged = config.most_creditors * HALVES * config.staging_blocks if config.borrow else 0
    return -(-staged // layers)


def possible(config: LendingConfig, engine: Engine) -> LendingConfig:
    """As far as the engine allows it."""
    if isinstance(engine, TorchEngine) and engine.is_divisible:
        return config
    is_gpu = isinstance(engine, TorchEngine) and engine.pie is None and _device(engine) != "cpu"
    allowed = {"max_lent_fraction": 0.0} if is_gpu else {"lend": False}
    return config.model_copy(update={"borrow": False, **allowed})


def _device(engine: TorchEngine) -> str:
    return engine.pools[0][0].device.type


class Neighbourhood:
    """One worker's. `pool` is what its sequences get their blocks from."""

    def __init__(self, bus: Bus, config: WorkerConfig, engine: Engine, own: OwnPool, clock: Clock) -> None:
        """Raises ConfigError for a transport that is not there, and for `borrow` where it cannot be."""
        self._bus = bus
        self._config = config.lending
        self._engine = engine
        self._bounce_blocks = config.lending.bounce_blocks if config.lending.borrow else 0
        self._clock = clock
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._want = WantKv(tokens=0)
        self._want_until_s = 0.0
        self._is_busy: Callable[[], bool] = lambda: False
        self._lending: Lending | None = None
        self._creditor: Creditor | None = None
        self._borrower: Borrower | None = None
        host = config.host or socket.gethostname()
        self._plane = BulkPlane(bus, host, make_transports(config.bulk), config.bulk.ticket_s)
        self.pool: Pool = own
        own_tokens = (engine.kv_blocks - self._bounce_blocks) * engine.block_tokens
        self._reach = Reach(bus.instance, config.served_name, own_tokens, engine.max_positions)
        if self._config.borrow and isinstance(engine, TorchEngine) and engine.is_divisible:
            extended = ExtendedPool(own, engine.kv_blocks)
            self.pool = extended
            debtor = Debtor(
                engine.attention,
                q_heads=engine.q_heads,
                own_blocks=engine.kv_blocks,
                block_tokens=engine.block_tokens,
                staging_blocks=self._config.staging_blocks,
                most_creditors=self._config.most_creditors,
                deadline_s=self._config.answer_s,
                on_transfer=self._on_transfer,
                clock=clock,
            )
            self._borrower = Borrower(debtor, extended, self._plane, self._on_failed)

    @property
    def plane(self) -> BulkPlane:
        """For what else goes from worker to worker."""
        return self._plane

    @property
    def longest_tokens(self) -> int:
        """Of a sequence that this worker may ever be asked to hold."""
        own_tokens = self._engine.kv_blocks * self._engine.block_tokens
        return self._engine.max_positions if self._borrower else min(self._engine.max_positions, own_tokens)

    def lost_blocks(self, error: CreditorLost) -> set[int]:
        """See `Runner`; on the engine's thread."""
        return set() if self._borrower is None else self._borrower.lose_creditor(error)

    def attach(self, runner: Runner, own: LendablePool, fingerprint: bytes) -> None:
        """The engine's thread. To be called once, before `serve`."""
        engine, config = self._engine, possible(self._config, self._engine)
        host = self._host_memory(config)
        owner = Owner(
            worker_id=self._bus.instance,
            incarnation=self._bus.incarnation,
            blocks=engine.kv_blocks,
            block_tokens=engine.block_tokens,
            fingerprint=fingerprint,
            host_blocks=0 if host is None else host.blocks,
            host_attends=host is None or host.attends,
        )
        self._is_busy = lambda: runner.is_busy
        if self._borrower is not None:
            self._borrower.attach(runner)
        self._lending = Lending(
            self._bus,
            config,
            owner,
            PoolVault(runner, own),
            on_lost=self._on_lost,
            borrower=self._borrower,
            clock=self._clock,
        )
        if config.lend and isinstance(engine, TorchEngine):
            creditor = self._creditor = Creditor(
                engine.attention,
                LentGrants(self._lending.grants, self._lending.table, self._on_freed, self._clock),
                ComputeBudget(config.max_remote_attention_fraction),
                block_tokens=engine.block_tokens,
                clock=self._clock,
                is_busy=self._is_busy,
                host=host,
            )
            for kind, receiver in creditor.receivers.items():
                self._plane.serve(kind, receiver)

    def _host_memory(self, config: LendingConfig) -> LentMemory | None:
        """None where none is lent. Raises ConfigError where the settings grant less than a block."""
        engine = self._engine
        if not config.lend or not isinstance(engine, TorchEngine):
            return None
        blocks = host_blocks(config, engine.attention)
        if not blocks:
            return None
        attends = config.host_attention.attends(_device(engine))
        return host_memory(engine.attention, blocks, attends=attends)

    async def listen(self) -> None:
        """Takes commands from now on: before a heartbeat says where to dial."""
        await self._bus.attach(self._handlers, self)
        await self._bus.attach(plane.HANDLERS, self._plane)

    async def serve(self) -> None:
        """After `listen`, until cancelled."""
        assert self._lending is not None
        try:
            await self._lending.serve()
        finally:
            await self._bus.detach(self._handlers, self)
            await self._bus.detach(plane.HANDLERS, self._plane)

    @property
    def _handlers(self) -> tuple[Handler, ...]:
        return HANDLERS if self._borrower is not None else ()

    def open(self) -> None:
        """The bulk plane listens. Raises ConfigError where it cannot."""
        self._plane.open()

    def close(self) -> bool:
        """Ends all links, when the engine's thread has ended. False when one took too long."""
        if self._borrower is not None:
            self._borrower.close()
        return self._plane.close()

    def section(self, capacity: Capacity) -> dict[str, Any]:
        """Of the heartbeat: what is lent and borrowed, and the context that all together can hold."""
        assert self._lending is not None
        if self._creditor is not None:
            # Grants are given on this thread: nobody gets one between the two calls.
            self._creditor.keep(self._lending.grants.debtors())
        now_s = self._clock()
        want = self._want if now_s < self._want_until_s else WantKv(tokens=0)
        needed_blocks = -(-want.tokens // self._engine.block_tokens) + 1 if want.tokens else 0
        self._lending.want(needed_blocks, may_borrow_ahead=want.may_borrow_ahead)
        told = {**self._lending.section(capacity), "bulk_addresses": dict(self._plane.addresses)}
        if self._borrower is not None:
            told["max_context_tokens"] = self._reach.context_tokens(now_s)
        return told

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        assert self._lending is not None
        return {"bulk": ", ".join(self._plane.addresses), **self._lending.details()}

    def on_want(self, want: WantKv) -> None:
        self._want, self._want_until_s = want, self._clock() + _WANT_S

    @property
    def wants_reports(self) -> bool:
        """Whether other workers' heartbeats are of any use here."""
        return self._borrower is not None

    def on_reported(self, report: WorkerReported) -> None:
        """Any worker's heartbeat."""
        now_s = self._clock()
        self._reach.on_report(report, now_s)
        self._plane.on_reported(report)
        if self._lending is not None:
            self._lending.pressures.on_reported(report, now_s)

    def _on_transfer(self, link: PeerLink, size_bytes: int, took_s: float) -> None:
        """On the engine's thread."""
        self._on_loop(partial(self._plane.on_transfer, link, size_bytes, took_s))

    def _on_lost(self, logical: Sequence[int]) -> None:
        """Leases are over."""
        if self._borrower is not None:
            self._borrower.lose(logical)

    def _on_failed(self, creditor_id: str) -> None:
        """On the engine's thread."""
        lending = self._lending
        if lending is not None:
            self._on_loop(partial(lending.on_creditor_failed, creditor_id))

    def _on_freed(self, freed: Freed) -> None:
        """On a link's thread."""
        lending = self._lending
        if lending is not None:
            self._on_loop(partial(lending.free_later, freed))

    def _on_loop(self, call: Callable[[], None]) -> None:
        """From another thread, which may end after the loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
