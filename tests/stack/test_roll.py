"""A stack is rolled under load from this code to the last release's, and back; nobody notices.

The last release is the last tag; while there is none, the commit that is named here. Its code is taken out of
the repository into a folder of its own. A clone without it has a copy of this code rolled to and back: that
messages fit, `tests/shared/messages/test_releases.py` says without a clone's help.
"""

import asyncio
import io
import shutil
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.kit.load import Answer, Target, complete_all, insist
from shared.release import PROTOCOL
from tests.stack.running import ROOT, RunningStack, running_stack
from tests.tasks import ran

_WARNS = pytest.mark.filterwarnings("default:this clone has no earlier release")
pytestmark = [pytest.mark.stack, pytest.mark.slow, _WARNS]

UNTAGGED = "bde2a74"
"""Where nothing is tagged: a state of 2026-11-24."""
STREAMS = 6
_TOKENS = 300
_GRACE_S = 0.2
"""Shorter than answers take: a gateway that is rolled leaves its clients with the others."""
_DEADLINE_S = 120.0
_ROLL_S = 300.0


def last_release(root: Path) -> str | None:
    """The last tag before this commit, or the commit above; None where this is no clone that has it."""
    git = ["git", "-C", str(root)]
    tag = ran([*git, "describe", "--tags", "--abbrev=0", "HEAD^"])
    name = tag.stdout.strip() or UNTAGGED
    found = subprocess.run([*git, "cat-file", "-e", f"{name}^{{tree}}"], capture_output=True, check=False)
    return None if found.returncode else name


@pytest.fixture(scope="module")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    name = last_release(ROOT)
    if name is None:
        warnings.warn("this clone has no earlier release: rolled to a copy of its own code", stacklevel=1)
        for part in ("services", "shared", "models"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", name], capture_output=True, check=True, timeout=60
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
    if (ROOT / "build").exists():  # of the same sources there is one library already
        (folder / "build").symlink_to(ROOT / "build")
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    run = tmp_path_factory.mktemp("rolled") / "run"
    settings = (f"gateway.shutdown_grace_s={_GRACE_S}",)
    with running_stack(run, flags=("--gateways", "2"), settings=settings) as running:
        yield running


def bodies() -> list[dict[str, Any]]:
    """Half of them greedy, half with a seed."""
    return [
        {
            "prompt": f"Once upon a time, {number} days ago, there was a fox",
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            **({"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}),
        }
        for number in range(STREAMS)
    ]


async def _served_while_rolling(stack: RunningStack, target: Target, code: Path) -> list[Answer]:
    """Answers of clients that ask again and again until `roll` has ended."""
    argv = ("-m", "services", "roll", "--run-dir", str(stack.run_dir), "--code", str(code))
    roll = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )

    async def client(number: int, body: dict[str, Any]) -> list[Answer]:
        answers: list[Answer] = []
        while roll.returncode is None:
            name = f"{code.name}-{number}-{len(answers)}"
            answers.append(await insist(target, body, name, _DEADLINE_S))
        return answers

    clients = [asyncio.create_task(client(number, body)) for number, body in enumerate(bodies())]
    async with asyncio.timeout(_ROLL_S):
        said, _ = await roll.communicate()
        answers = await asyncio.gather(*clients)
    assert roll.returncode == 0, said.decode() + stack.logs()
    return [answer for several in answers for answer in several]


def _folder_of(stack: RunningStack, name: str) -> Path:
    """From which it was started."""
    return Path(f"/proc/{stack.child(name)['pid']}/cwd").resolve()


def test_the_last_release_is_the_last_tag_before_this_commit(tmp_path: Path) -> None:
    """Not a tag of this very commit, which it would be compared with itself."""

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, "-C", str(tmp_path), *words], check=True, capture_output=True)

    assert last_release(tmp_path) is None, "no clone"
    git("init", "-q")
    for number in range(3):
        git("commit", "-q", "--allow-empty", "-m", f"{number}")
        git("tag", f"v{number}")
        assert last_release(tmp_path) == (f"v{number - 1}" if number else None)


async def test_nothing_is_lost_on_the_way_to_a_release_and_back(stack: RunningStack, old_code: Path) -> None:
    target = Target(stack.port, stack.model.name, stack.key)
    wanted = await complete_all(target, bodies(), _DEADLINE_S)
    texts = {answer.text for answer in wanted}
    assert all(answer.ok for answer in wanted) and len(texts) == STREAMS
    for code in (old_code, ROOT):
        answers = await _served_while_rolling(stack, target, code)
        assert len(answers) >= STREAMS and not [answer.error for answer in answers if not answer.ok]
        assert {answer.text for answer in answers} <= texts
        assert {answer.completion_tokens for answer in answers} == {_TOKENS}
        names = ("gateway-0", "gateway-1", "scheduler-0", "worker-0", "worker-1")
        assert {_folder_of(stack, name) for name in names} == {code.resolve()}
    told = {service["protocol"] for service in stack.status()["services"]}
    assert told == {PROTOCOL}
