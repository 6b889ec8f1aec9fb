"""The settling world with several ledgers that hear each other over a bus that loses messages.

Each has its own table of debts, coordinator and view of who leads; they die with all they know.
"""

from dataclasses import dataclass
from functools import partial

from services.ledger.core.debt_ledger import DebtLedger
from services.ledger.core.dgfm.coordinator import Coordinator, Leadership, SettlementAsk, SettleRules
from shared.messages.reports import WorkerReported
from tests.stack.settling_world import SettlingWorld

SILENCE_S = 2.0
RULES = SettleRules(threshold_tokens=16, interval_s=0.5)


@dataclass
class Ledger:
    """One in its present life."""

    ledger_id: str
    incarnation: int
    is_alive: bool = True

    def __post_init__(self) -> None:
        self.table = DebtLedger(silence_s=2.0)
        self.coordinator = Coordinator(f"{self.ledger_id}-{self.incarnation}", RULES)
        self.leadership = Leadership(self.ledger_id, self.incarnation, silence_s=SILENCE_S)


class LedgersWorld(SettlingWorld):
    """`self.ledger`, whom debtors ask, is any one that lives."""

    def __init__(self, workers: int, ledgers: int = 2) -> None:
        super().__init__(workers)
        self.ledgers = {f"l{at}": Ledger(f"l{at}", 1) for at in range(ledgers)}
        self._part_in: dict[str, str] = {}
        """Worker → the settlement that it has set blocks apart for, last."""

    # --- what a test does

    def beat(self, name: str) -> None:
        super().beat(name)
        report = self.members[name].report()
        for ledger in self.ledgers.values():
            self._post(partial(self._heartbeat, ledger, report))

    def announce(self, ledger_id: str) -> None:
        sender = self.ledgers[ledger_id]
        if sender.is_alive:
            for ledger in self.ledgers.values():
                self._post(partial(self._announced, ledger, sender))

    def look(self, ledger_id: str) -> None:
        """It starts what it sees, if it leads."""
        ledger = self.ledgers[ledger_id]
        ledger.table.on_tick(self.now_s)
        if ledger.is_alive and ledger.leadership.leads(self.now_s):
            self.settle_by(ledger.coordinator, ledger.table)

    def kill_ledger(self, ledger_id: str) -> None:
        self.ledgers[ledger_id].is_alive = False

    def start_ledger(self, ledger_id: str) -> None:
        before = self.ledgers[ledger_id]
        if not before.is_alive:
            self.ledgers[ledger_id] = Ledger(ledger_id, before.incarnation + 1)

    def leaders(self) -> list[str]:
        """Who believes to lead now."""
        alive = [ledger for ledger in self.ledgers.values() if ledger.is_alive]
        return [ledger.ledger_id for ledger in alive if ledger.leadership.leads(self.now_s)]

    def quiet_s(self, seconds: float) -> None:
        """So long everybody is heard by everybody."""
        for _ in range(round(seconds / 0.5)):
            for ledger_id in self.ledgers:
                self.announce(ledger_id)
            for name in self.names:
                self.beat(name)
            self.deliver_all()
            self.advance(0.5)
            for ledger_id in self.ledgers:
                self.look(ledger_id)
            self.deliver_all()
            self.check()

    # --- how it is connected

    def is_alive(self, coordinator: Coordinator) -> bool:
        return super().is_alive(coordinator) or any(
            ledger.coordinator is coordinator and ledger.is_alive for ledger in self.ledgers.values()
        )

    def _serve(self, coordinator: Coordinator, ask: SettlementAsk) -> None:
        """As before, and a settlement moves nothing that is set apart for another one."""
        settling = self.life(self.members[ask.worker_id]).settling
        settling.tick(self.now_s)
        frozen = settling.frozen if settling.is_on else None
        super()._serve(coordinator, ask)
        if frozen is None and settling.is_on:
            self._part_in[ask.worker_id] = ask.message.settlement
        elif frozen is not None and ask.message.settlement != self._part_in[ask.worker_id]:
            assert settling.is_on and settling.frozen == frozen, "one worker, two settlements"

    def _heartbeat(self, ledger: Ledger, report: WorkerReported) -> None:
        ledger.table.on_reported(report, self.now_s)

    def _announced(self, hearer: Ledger, speaker: Ledger) -> None:
        if hearer.is_alive:
            hearer.leadership.on_announced(speaker.ledger_id, speaker.incarnation, self.now_s)

    # --- what must hold

    def check(self) -> None:
        """As before, with every ledger."""
        super().check()
        for ledger in self.ledgers.values():
            ledger.table.check_integrity()
            ledger.leadership.check_integrity()
            ledger.coordinator.check_integrity()
