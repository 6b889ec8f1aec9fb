"""Settlements on the bus: sends what the coordinator asks of workers, and tells it what they said.

Decides nothing. A worker that does not answer in time, or refuses, has said nothing. Every question has a
deadline and a task of its own; as many as there are workers in settlements.
"""

import asyncio
from collections.abc import Iterable, Mapping

from services.ledger.dgfm.coordinator import Ask, Coordinator, SettleRules
from shared import subjects
from shared.bus import Bus, fenced
from shared.errors import KvasirError
from shared.log import canonical, get_logger
from shared.messages.lending import Settled, SettlePhase

_log = get_logger("ledger.settlements")


class Settlements:
    """Of one ledger process, in one life of it."""

    def __init__(self, bus: Bus, rules: SettleRules) -> None:
        self._bus = bus
        self._deadline_s = rules.valid_for_s
        self.core = Coordinator(f"{bus.instance}-{bus.incarnation}", rules)
        self._tasks: set[asyncio.Task[None]] = set()

    def on_tick(
        self, debts: Mapping[tuple[str, str], int], block_tokens: Mapping[str, int], now_s: float
    ) -> None:
        """Starts what can be settled; `debts` in tokens."""
        self._send(self.core.on_tick(debts, block_tokens, now_s))

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        core = self.core
        return {
            "settling": core.running,
            "settlements": core.completed,
            "settlements_aborted": core.aborted,
            "settled_tokens": core.settled_tokens,
        }

    async def close(self) -> None:
        """What is under way is given up; the workers thaw by themselves."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _send(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            task = asyncio.create_task(self._fenced(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fenced(self, ask: Ask) -> None:
        with fenced("settlement"):
            await self._ask(ask)

    async def _ask(self, ask: Ask) -> None:
        answer: Settled | None = None
        try:
            answer = await self._bus.request(
                subjects.worker_settle(ask.worker_id), ask.message, Settled, deadline_s=self._deadline_s
            )
        except KvasirError as error:
            _log.info("%s did not %s: %s", ask.worker_id, ask.message.phase, error)
        before = self.core.completed, self.core.aborted
        self._send(self.core.on_answer(ask.message, ask.worker_id, answer))
        if (self.core.completed, self.core.aborted) != before:
            whole = self.core.completed > before[0]
            after = self.core.last_end
            canonical(_log, "settlement over", settlement=ask.message.settlement, whole=whole, after=after)
        elif answer is not None and ask.message.phase is SettlePhase.FREEZE:
            _log.debug("%s can settle %d blocks", ask.worker_id, answer.blocks)
