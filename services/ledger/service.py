"""The ledger on the bus: keeps the table of who has and lent what, answers `FindCreditors`.

Soft state: the next round of heartbeats after a restart is all it needs. It moves no memory and grants none.
"""

import asyncio

from services.ledger.config import LedgerConfig
from services.ledger.policy import candidates
from services.ledger.state import Table
from shared import subjects
from shared.bus import Bus, Endpoint, Gatherable, Handler, Listener
from shared.clock import Clock, monotonic_s
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.reports import ServiceStatus, WorkerReported

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported"),
    Endpoint(subjects.LEDGER_CANDIDATES, FindCreditors, "find_creditors", concurrency=1),
    Gatherable(subjects.status("ledger"), Empty, "status"),
)
_TICK_S = 0.5

_log = get_logger("ledger")


class Ledger:
    """The table, kept from heartbeats."""

    def __init__(self, bus: Bus, config: LedgerConfig, clock: Clock = monotonic_s) -> None:
        self._bus = bus
        self._table = Table(silence_s=config.worker_timeout_s)
        self._clock = clock
        self._started_s = clock()
        self._asked = 0

    def on_reported(self, report: WorkerReported) -> None:
        self._table.on_reported(report, self._clock())

    async def find_creditors(self, asked: FindCreditors) -> CreditorCandidates:
        """Whom to ask, best first; nobody when no worker has anything to lend."""
        self._table.on_tick(self._clock())
        self._asked += 1
        found = candidates(self._table, asked.debtor_id, asked.tokens, asked.refused_by)
        return CreditorCandidates(candidates=tuple(found))

    async def watch(self) -> None:
        """Drops workers that fell silent."""
        while True:
            await asyncio.sleep(_TICK_S)
            for worker_id in self._table.on_tick(self._clock()):
                canonical(_log, "worker dropped", worker=worker_id)

    async def status(self, _: Empty) -> ServiceStatus:
        """What `python -m services status` shows."""
        now_s = self._clock()
        return ServiceStatus(
            service="ledger",
            instance=self._bus.instance,
            incarnation=self._bus.incarnation,
            uptime_s=now_s - self._started_s,
            details={
                "questions": self._asked,
                "tokens": [
                    {
                        "worker": account.worker_id,
                        "host": account.host,
                        "total": account.total_tokens,
                        "free": account.own_free_tokens,
                        "lent": account.lent_tokens,
                        "borrowed": account.borrowed_tokens,
                        "lent_to": account.lent_to_tokens,
                        "borrowed_from": account.borrowed_from_tokens,
                        "seq": account.seq,
                        "heard_s_ago": round(now_s - account.heard_s, 2),
                    }
                    for account in sorted(self._table, key=lambda account: account.worker_id)
                ],
            },
        )


async def run(config: LedgerConfig) -> None:
    """Serves until cancelled. Raises BusUnavailable when NATS is away at start."""
    bus = await Bus.connect(config.bus, service="ledger", instance=config.instance)
    try:
        ledger = Ledger(bus, config)
        await bus.attach(HANDLERS, ledger)
        canonical(_log, "ledger serving")
        await ledger.watch()
    finally:
        await bus.close()
