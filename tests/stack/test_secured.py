"""The stack on an encrypted bus: everything works within its permissions, and nobody asked for more."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import running_stack

pytestmark = pytest.mark.stack


def test_an_encrypted_stack_answers_through_a_restart_and_nothing_is_refused(tmp_path: Path) -> None:
    questions = [Question(prompt, {"max_tokens": 40}) for prompt in mixed(4, longest_words=20, seed=3)]
    with running_stack(tmp_path / "run", workers=1, flags=("--tls",)) as stack:
        assert stack.status()["stack"]["nats_url"].startswith("tls://")
        for name in ("scheduler-0", "nats"):
            assert not refusals(stack.run_dir)
            stack.signal(name, signal.SIGKILL)
            answers = asyncio.run(stack.client().ask_all(questions))
            assert all(answer.complete for answer in answers), [answer.errors for answer in answers]
            stack.until_restarted(name, restarts=1)
        assert [line for line in refusals(stack.run_dir) if not is_answer_of_before(line)] == []


def refusals(run_dir: Path) -> list[str]:
    """What the logs say of them."""
    told = ("may not use a subject", "permission_refused", "Violation")
    lines = [line for path in (run_dir / "logs").glob("*.log") for line in path.read_text().splitlines()]
    return [line for line in lines if any(word in line for word in told)]


def is_answer_of_before(line: str) -> bool:
    """To a question that came before the server was killed: who asks allows the answer, and the next server
    has heard of no question."""
    return "publish" in line.lower() and "_inbox_" in line.lower()
