"""The ledger on the bus: keeps a table of workers' memory and debts, and answers `FindCreditors`.

Its state is soft. Several ledgers may run, each with its own table; they tell each other where they sent
debtors and which creditors refused. The ledger that leads settles cycles of debts.
"""

import asyncio
from collections.abc import Iterable, Mapping

from services.ledger.config import LedgerConfig
from services.ledger.core.debt_ledger import Account, DebtLedger, candidates
from services.ledger.core.dgfm.coordinator import Coordinator, Leadership, SettlementAsk, SettleRules
from shared import subjects
from shared.bus import Bus, Endpoint, Handler, Listener, fenced, recorder_handlers, status_handlers, status_of
from shared.clock import Clock, monotonic_s
from shared.errors import KvasirError
from shared.liveness import AwakeClock
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import CreditorCandidate, CreditorCandidates, FindCreditors
from shared.messages.lending import CreditorOffered, KvTier, LedgerAnnounced, Settled
from shared.messages.reports import ServiceStatus, WorkerReported


class Settlements:
    """Carries settlements out: sends the coordinator's messages to workers and returns their answers."""

    def __init__(self, bus: Bus, rules: SettleRules) -> None:
        self._bus = bus
        self._deadline_s = rules.valid_for_s
        self.core = Coordinator(f"{bus.instance}-{bus.incarnation}", rules)
        self._tasks: set[asyncio.Task[None]] = set()

    def on_tick(
        self, debts: Mapping[tuple[str, str], int], block_tokens: Mapping[str, int], now_s: float
    ) -> None:
        """Start settlements of the debts, in tokens."""
        self._send(self.core.on_tick(debts, block_tokens, now_s))

    def details(self) -> dict[str, object]:
        """Return figures for `python -m services status`."""
        core = self.core
        return {
            "settling": core.running,
            "settlements": core.completed,
            "settlements_aborted": core.aborted,
            "settled_tokens": core.settled_tokens,
        }

    async def close(self) -> None:
        """Give up running settlements; the workers thaw by themselves."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _send(self, asks: Iterable[SettlementAsk]) -> None:
        for ask in asks:
            task = asyncio.create_task(self._ask(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, ask: SettlementAsk) -> None:
        core, subject = self.core, subjects.worker_settle(ask.worker_id)
        answer: Settled | None = None
        with fenced("settlement"):
            try:
                answer = await self._bus.request(subject, ask.message, Settled, deadline_s=self._deadline_s)
            except KvasirError as error:
                _log.info("%s did not %s: %s", ask.worker_id, ask.message.phase, error)
            completed, over = core.completed, core.completed + core.aborted
            self._send(core.on_answer(ask.message, ask.worker_id, answer))
            if core.completed + core.aborted > over:
                whole, after = core.completed > completed, core.last_end
                name = ask.message.settlement
                canonical(_log, "settlement over", settlement=name, whole=whole, after=after)


HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported", sender="worker_id"),
    Listener(subjects.LEDGER_OFFERED, CreditorOffered, "on_offered"),
    Listener(subjects.LEDGER_ANNOUNCED, LedgerAnnounced, "on_announced"),
    Endpoint(
        subjects.ANY_LEDGER_CANDIDATES, FindCreditors, "find_creditors", 1, queue="ledger", sender="debtor_id"
    ),
    *status_handlers("ledger"),
)
_TICK_S = 0.5

_log = get_logger("ledger")


class Ledger:
    """Handlers of the ledger: heartbeats, requests for creditors, and settlements while it leads."""

    def __init__(self, bus: Bus, config: LedgerConfig, clock: Clock = monotonic_s) -> None:
        self._bus = bus
        self.table = DebtLedger(silence_s=config.worker_timeout_s)
        rules = SettleRules(
            threshold_tokens=config.settle_threshold_tokens,
            interval_s=config.settle_interval_s,
            valid_for_s=config.settle_valid_s,
        )
        self.settlements = Settlements(bus, rules) if config.settle else None
        self.leadership = Leadership(bus.instance, bus.incarnation)
        self._was_leading = False
        self._clock = clock
        self._awake_s = AwakeClock(clock, lambda: bus.connected)
        self._started_s = clock()
        self.asked = 0

    def on_reported(self, report: WorkerReported) -> None:
        self.table.on_reported(report, self._awake_s())

    def on_offered(self, offered: CreditorOffered) -> None:
        """Record that another ledger pointed a debtor to a creditor."""
        if offered.ledger_id != self._bus.instance:
            self.table.on_refused(offered.refused_by)
            self.table.on_refused(offered.refused_host_by, KvTier.HOST)
            self.table.on_offered(offered.creditor_id, offered.debtor_id, offered.tokens, offered.tier)

    def on_announced(self, announced: LedgerAnnounced) -> None:
        """Take in the announcement of any ledger, this one included."""
        self.leadership.on_announced(announced.ledger_id, announced.incarnation, self._clock())

    async def find_creditors(self, asked: FindCreditors) -> CreditorCandidates:
        """Return the creditors to ask, best first; none when no worker can lend."""
        self.table.on_tick(self._awake_s())
        self.asked += 1
        refused = asked.refused_by, asked.refused_host_by
        found = candidates(self.table, asked.debtor_id, asked.tokens, *refused, for_cache=asked.for_cache)
        await self._tell(asked, found)
        return CreditorCandidates(candidates=tuple(found))

    async def _tell(self, asked: FindCreditors, found: list[CreditorCandidate]) -> None:
        """Tell the other ledgers. One that misses it spreads debtors slightly worse."""
        first = found[0] if found else None
        event = CreditorOffered(
            ledger_id=self._bus.instance,
            debtor_id=asked.debtor_id,
            creditor_id="" if first is None else first.worker_id,
            tokens=0 if first is None else min(asked.tokens, first.free_tokens),
            tier=KvTier.DEVICE if first is None else first.tier,
            refused_by=asked.refused_by,
            refused_host_by=asked.refused_host_by,
        )
        await self._publish(subjects.LEDGER_OFFERED, event)

    async def _publish(self, subject: str, event: CreditorOffered | LedgerAnnounced) -> None:
        try:
            await self._bus.publish(subject, event)
        except KvasirError as error:
            _log.debug("the other ledgers were not told: %s", error)

    async def watch(self) -> None:
        """Drop silent workers, and settle cycles of debts while it leads, until cancelled."""
        own = LedgerAnnounced(ledger_id=self._bus.instance, incarnation=self._bus.incarnation)
        while True:
            if self.settlements is not None:
                await self._publish(subjects.LEDGER_ANNOUNCED, own)
            await asyncio.sleep(_TICK_S)
            with fenced("ledger tick"):
                for worker_id in self.table.on_tick(self._awake_s()):
                    canonical(_log, "worker dropped", worker=worker_id)
                if self.settlements is not None:
                    self._settle(self.settlements, self._clock())

    def _settle(self, settlements: Settlements, now_s: float) -> None:
        leads = self.leadership.leads(now_s)
        if leads != self._was_leading:
            self._was_leading = leads
            canonical(_log, "leading" if leads else "no longer leading", heard=self.leadership.heard(now_s))
        if leads:
            settlements.on_tick(self.table.debts(), self.table.block_tokens(), now_s)

    async def close(self) -> None:
        """Give up running settlements."""
        if self.settlements is not None:
            await self.settlements.close()

    async def status(self, _: Empty) -> ServiceStatus:
        """Return the status for `python -m services status`."""
        now_s, awake_s = self._clock(), self._awake_s()
        return status_of(
            self._bus,
            "ledger",
            now_s - self._started_s,
            {
                "questions": self.asked,
                "leads": self._was_leading,
                "ledgers": self.leadership.heard(now_s),
                **({} if self.settlements is None else self.settlements.details()),
                "tokens": [
                    _row(account, self.table.liveness.unheard_s(name, awake_s))
                    for name, account in sorted(self.table.accounts.items())
                ],
            },
        )


def _row(account: Account, heard_s_ago: float) -> dict[str, object]:
    """Return a worker's row of the status; amounts in tokens."""
    report, tokens = account.report, account.tokens

    def by_peer(blocks: Mapping[str, int]) -> dict[str, int]:
        return {peer: tokens(count) for peer, count in blocks.items()}

    return {
        "worker": report.worker_id,
        "host": report.host,
        "total": tokens(report.capacity.total_blocks),
        "free": account.offers[KvTier.DEVICE].free_tokens,
        "lent": tokens(report.capacity.lent_blocks + report.capacity.host_lent_blocks),
        "borrowed": tokens(report.capacity.borrowed_blocks),
        "lent_to": by_peer(report.lent_to_blocks),
        "borrowed_from": by_peer(report.borrowed_from_blocks),
        "host_lent_to": by_peer(report.host_lent_to_blocks),
        "host_borrowed_from": by_peer(report.host_borrowed_from_blocks),
        "seq": report.seq,
        "heard_s_ago": round(heard_s_ago, 2),
    }


async def run(config: LedgerConfig) -> None:
    """Serve until cancelled. Raises BusUnavailable when NATS cannot be reached at start."""
    bus = await Bus.connect(config.bus, service="ledger", instance=config.instance)
    try:
        ledger = Ledger(bus, config)
        await bus.attach(HANDLERS, ledger)
        await bus.attach(recorder_handlers("ledger"), bus.recorder)
        canonical(_log, "ledger serving")
        try:
            await ledger.watch()
        finally:
            await ledger.close()
    finally:
        await bus.close()
