"""Two ledger processes beside a stack: both answer, one starts settlements, and the other takes that over."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.stack.rundir import RunDirectory
from shared import subjects
from shared.bus import Bus
from shared.config import ENV_PREFIX
from shared.errors import KvasirError
from shared.messages.commands import CreditorCandidates, FindCreditors
from tests.patience import until
from tests.stack.running import ROOT, RunningStack, running_stack
from tests.stack.test_settling import SETTINGS, Asking, mutual_need, questions, texts
from tests.stack.watch import Seen, Watch, bus_access, nobody_owes, watching
from tests.tasks import running

pytestmark = pytest.mark.stack
ASKER = "worker-asker"
"""One more user, let in while the stack runs."""
OF_LEDGERS = {"SETTLE_THRESHOLD_TOKENS": "64", "SETTLE_INTERVAL_S": "0.5", "SETTLE_VALID_S": "3.0"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two workers that borrow, and no ledger."""
    folder = tmp_path_factory.mktemp("ledgers") / "run"
    settings = tuple(each for each in SETTINGS if not each.startswith("ledger."))
    with running_stack(folder, settings=settings, flags=("--without", "ledger")) as running:
        yield running


@contextmanager
def ledger(stack: RunningStack, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no child of the stack's: nobody starts it again."""
    env = {f"{ENV_PREFIX}LEDGER__{key}": value for key, value in OF_LEDGERS.items()}
    let_in = stack.command("credentials", name)
    assert let_in.returncode == 0, let_in.stderr
    env |= os.environ | dict(line.split("=", 1) for line in let_in.stdout.splitlines())
    log = RunDirectory(stack.run_dir).path / "logs" / f"{name}.log"
    argv = [sys.executable, "-m", "services.ledger", "--instance", name]
    with (
        Path(log).open("ab") as out,
        subprocess.Popen(argv, cwd=ROOT, env=env, stdout=out, stderr=out) as one,
    ):
        try:
            yield one
        finally:
            one.kill()


def leads(seen: Seen, name: str) -> bool:
    """It alone, as every ledger that answers says."""
    return [each for each, row in seen.items() if row["leads"]] == [name]


def settled(seen: Seen, name: str) -> int:
    return int(seen[name]["settlements"]) if name in seen else 0


@dataclass
class Debtor:
    """Asks the ledgers all the time, as a worker does."""

    bus: Bus
    answered: int = 0
    missed: list[str] = field(default_factory=list)

    async def keep_asking(self) -> None:
        question = FindCreditors(debtor_id=ASKER, tokens=16)
        while True:
            try:
                await self.bus.request(
                    subjects.ledger_candidates(ASKER), question, CreditorCandidates, deadline_s=1.0
                )
                self.answered += 1
            except KvasirError as error:
                self.missed.append(str(error))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def asking_ledgers(stack: RunningStack) -> AsyncIterator[Debtor]:
    assert stack.command("credentials", ASKER).returncode == 0
    bus = await Bus.connect(bus_access(stack).config(ASKER), service="worker", instance=ASKER)
    debtor = Debtor(bus)
    try:
        async with running(debtor.keep_asking()):
            yield debtor
    finally:
        await bus.close()


async def until_leads(watch: Watch, name: str, expected: int) -> None:
    await watch.until(
        lambda seen: len(seen) == expected and leads(seen, name), service="ledger", expected=expected
    )


async def test_settling_is_taken_over_and_questions_are_answered_all_along(stack: RunningStack) -> None:
    alone = await stack.client().ask_all(questions(1))
    with ledger(stack, "ledger-0") as first, ledger(stack, "ledger-1"):
        async with watching(stack) as watch, asking_ledgers(stack) as debtor:
            await until_leads(watch, "ledger-0", 2)
            debtor.missed.clear()
            async with mutual_need(stack):
                asking = Asking(stack, 1)
                await watch.until(lambda seen: settled(seen, "ledger-0") >= 1, service="ledger")
                assert settled(await watch.ask("ledger", 2), "ledger-1") == 0, "one of them settles"
                first.send_signal(signal.SIGKILL)
                answered = debtor.answered
                await until(lambda: debtor.answered > answered + 10)
                await until_leads(watch, "ledger-1", 1)
                await watch.until(lambda seen: settled(seen, "ledger-1") >= 1, service="ledger", expected=1)
                with ledger(stack, "ledger-0"):
                    await until_leads(watch, "ledger-0", 2)
                rounds = await asking.stop()
            for answers in rounds:
                assert texts(answers) == texts(alone)
            assert len(debtor.missed) <= 2, "what a killed ledger was at work on, nothing else"
            await watch.until(nobody_owes)
