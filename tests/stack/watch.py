"""Questions to workers and ledger about who owes whom, over a connection that stays open."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from services.stack.access import BusAccess
from services.stack.roll_call import RollCall
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.errors import KvasirError
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack

Seen = dict[str, dict[str, Any]]
"""Details by instance."""


def bus_access(stack: RunningStack) -> BusAccess:
    """Everybody's way to the stack's bus."""
    run = RunDirectory(stack.run_dir)
    return BusAccess.from_state(json.loads(run.state_file.read_text()), run.credentials())


class Watch:
    """Asks the workers and the ledger over a connection that stays open."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self._roll = RollCall(bus_access(stack).config(subjects.OPERATOR, connect_timeout_s=5.0))

    async def ask(self, service: str, expected: int) -> Seen:
        try:
            answers = await self._roll.ask(service, deadline_s=0.3, expected=expected)
        except KvasirError:
            return {}
        return {answer.instance: answer.details for answer in answers}

    async def until(
        self,
        condition: Callable[[Seen], bool],
        within_s: float = STACK_PATIENCE_S,
        service: str = "worker",
        expected: int = 2,
    ) -> float:
        """Seconds until the service's details are as wished."""
        began_s = time.monotonic()
        seen: Seen = {}
        while time.monotonic() < began_s + within_s:
            seen = await self.ask(service, expected)
            if condition(seen):
                return time.monotonic() - began_s
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within {within_s} s: {seen}\n{self._stack.logs()}")

    async def close(self) -> None:
        await self._roll.close()


@asynccontextmanager
async def watching(stack: RunningStack) -> AsyncIterator[Watch]:
    watch = Watch(stack)
    try:
        yield watch
    finally:
        await watch.close()


def lent(seen: Seen, creditor: str) -> int:
    return int(seen[creditor]["lent_blocks"]) if creditor in seen else -1


def debtor_of(seen: Seen) -> str | None:
    """Who owes the other, as both see it."""
    for debtor, creditor in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
        owed = lent(seen, creditor)
        if owed > 0 and debtor in seen and seen[debtor]["borrowed_blocks"] == owed:
            return debtor
    return None


def nobody_owes(seen: Seen) -> bool:
    return len(seen) == 2 and not any(row["lent_blocks"] or row["borrowed_blocks"] for row in seen.values())
