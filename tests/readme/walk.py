"""`make readme-test`: do what README.md and docs/recipes.md say, in order, in a clean clone, as a newcomer.

    python3 tests/readme/walk.py [--into DIR] [--only WORD] [--without WORD] [--list]

The commands are read from README's first `sh` block and from the tables of recipes, so they cannot drift. The
clone has an environment of its own: a path, a home, a terminal of 80 columns, and how pip reaches packages.
Everything is printed as it comes, and written to DIR/transcript.txt for a person to read. Exit code 0 when
all commands did what they should. Standard library only: it runs before anything is installed.
"""

import argparse
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_READY_S = 900.0
_END_S = 120.0
_COMMAND_S = 3600.0
_KEPT = ("PATH", "LANG", "SSL_CERT_FILE", "DOCKER_HOST")
_PLACEHOLDERS = {
    "FOLDER_OR_HUB_ID": "models/tiny_chat",
    "REQUEST_ID": "$(.venv/bin/python -m services logs | grep -o 'req_[0-9A-Za-z]*' | tail -1)",
}
"""What the pages leave to the reader."""
_FOREGROUND = "./kvasir up"
_QUESTION = "Hello! Who are you?"
_LONG_QUESTION = "Once upon a time there was a fox. " * 60
_SHOWN = (("lending.borrow", "borrowed creditor=", "logs"), ("pie.enabled", "layers swapped", "status"))
"""What a setting is for, and where somebody who looks sees that it happened."""


class Step(NamedTuple):
    """One command of the pages."""

    command: str
    what: str


def steps(text: str) -> list[Step]:
    """The commands of the first block and of the tables, in order."""
    first = re.search(r"```sh\n(.*?)```", text, re.S)
    rows = re.findall(r"^\| `((?:make|python|\./kvasir) [^`]+)` \| (.*) \|$", text, re.M)
    lines = [line.partition("#") for line in first[1].splitlines()] if first else []
    found = [Step(command.strip(), what.strip()) for command, _, what in lines] + [Step(*row) for row in rows]
    return [step for step in found if step.command]


def pages() -> str:
    """README, then recipes."""
    return (ROOT / "README.md").read_text() + (ROOT / "docs" / "recipes.md").read_text()


def prepared(command: str) -> str:
    """As it is typed in a clone: recipes say which Python `python` is."""
    for placeholder, example in _PLACEHOLDERS.items():
        command = command.replace(placeholder, example)
    return re.sub(r"^python ", ".venv/bin/python ", command)


class Walk:
    """One clone and what is done in it."""

    def __init__(self, folder: Path, transcript: IO[str]) -> None:
        self._folder, self._transcript, self.latest = folder, transcript, ""
        self._environment = {n: v for n, v in os.environ.items() if n in _KEPT or n[:4] == "PIP_"}
        self._environment |= {"HOME": str(folder.parent), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}

    def carry_out(self, step: Step) -> str | None:
        """Why it did not do what it should; None when it did."""
        command = prepared(step.command)
        self.say(f"\n$ {command}\n")
        began_s = time.monotonic()
        if step.command.startswith(_FOREGROUND):
            problem = self._stack(command)
        elif step.command == "make chat":
            problem = self._run(command, typed=f"{_QUESTION}\n/exit\n")
        elif step.command == "make compose-test" and not _has_docker(self._environment):
            problem = self._run(command, fails=True)
        else:
            problem = self._run(command)
        self.say(f"[{'it did not: ' + problem if problem else 'done'}, {time.monotonic() - began_s:.0f} s]\n")
        return problem

    def say(self, text: str) -> None:
        for out in (sys.stdout, self._transcript):
            out.write(text)
            out.flush()

    def _run(self, command: str, *, typed: str = "", word: str = "", fails: bool = False) -> str | None:
        """`word` is to be in what it says; where it `fails` in order, it does so without a traceback."""
        terminal = Terminal(command, self._folder, self._environment, self.say)
        terminal.type(typed)
        code = terminal.wait(_COMMAND_S)
        self.latest = terminal.said
        if (code != 0) != fails:
            return f"exit code {code}"
        if "Traceback" in terminal.said:
            return "a traceback"
        return None if word in terminal.said else f"it does not say {word!r}"

    def _stack(self, command: str) -> str | None:
        """A stack in the foreground: until ready, a question, a look inside, Ctrl-C."""
        self._run(".venv/bin/python -m services down")
        terminal = Terminal(command, self._folder, self._environment, self.say)
        own_scheduler = None
        try:
            if not terminal.until("ready in", _READY_S):
                return "it is not ready"
            if "--without scheduler" in command:
                example = [".venv/bin/python", "docs/examples/own_scheduler.py", ".run"]
                own_scheduler = subprocess.Popen(example, cwd=self._folder, env=self._environment)
                time.sleep(5)
            question = _LONG_QUESTION if "lending.borrow" in command else _QUESTION
            problem = self._run(f".venv/bin/python -m services chat --max-tokens 60 '{question}'")
            problem = problem or self._run(".venv/bin/python -m services status")
            for setting, word, where in _SHOWN:
                if setting in command and problem is None:
                    problem = self._run(f".venv/bin/python -m services {where}", word=word)
        finally:
            if own_scheduler is not None:
                own_scheduler.kill()
                own_scheduler.wait()
            terminal.interrupt()
            code = terminal.wait(_END_S)
        return problem or (None if code == 0 else f"exit code {code} after Ctrl-C")


class Terminal:
    """A command on a terminal of 80 × 24, whose output goes to `show` as it comes."""

    def __init__(
        self, command: str, folder: Path, environment: dict[str, str], show: Callable[[str], None]
    ) -> None:
        self.said, self._line = "", ""
        self._latest: list[str] = []
        self._show = show
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self._process = subprocess.Popen(
            ["sh", "-c", f"exec {command}" if command.startswith(".venv") else command],
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C: to everything in the foreground."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def until(self, text: str, timeout_s: float) -> bool:
        """False when it ended, or did not say so in time."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.said + self._line and time.monotonic() < deadline_s:
            if not self._read() and self._process.poll() is not None:
                break
        return text in self.said + self._line

    def wait(self, timeout_s: float) -> int:
        """Its exit code; it is killed when that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while self._read() or self._process.poll() is None:
            if time.monotonic() > deadline_s:
                os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._master)
        self._tell(self._line)
        return self._process.wait()

    def _tell(self, *lines: str) -> None:
        """Of a line written again and again the last is kept; of a table drawn again and again the first."""
        for line in lines:
            shown = line.rpartition("\r")[2]
            self.said += shown
            if shown.strip() == "" or shown not in self._latest:
                self._show(shown)
            self._latest = [*self._latest[-30:], shown]

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.2)[0]:
            return False
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # everybody who had it open has ended
            return False
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))
        *lines, self._line = (self._line + text.replace("\r\n", "\n")).split("\n")
        self._tell(*(f"{line}\n" for line in lines))
        return bool(data)


def cloned(into: Path) -> Path:
    """Return a clean clone in this folder."""
    clone = into.resolve() / "kvasir"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    return clone


def _has_docker(environment: dict[str, str]) -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "info"], env=environment, capture_output=True, check=False).returncode == 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Carry out what README.md and docs/recipes.md say, in a clean clone."
    )
    parser.add_argument("--into", type=Path, help="clone into this new folder [a temporary one]")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="commands that contain it"
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="WORD", help="not those; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="show the commands and end")
    arguments = parser.parse_args(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, it would be by all that is started
    chosen = [
        step
        for step in steps(pages())
        if (not arguments.only or any(word in step.command for word in arguments.only))
        and not any(word in step.command for word in arguments.without)
    ]
    if arguments.list:
        print("\n".join(step.command for step in chosen))
        return 0
    into: Path = arguments.into or Path(tempfile.mkdtemp(prefix="kvasir-readme-"))
    clone = cloned(into)
    with (into / "transcript.txt").open("w") as transcript:
        walk = Walk(clone, transcript)
        problems = {step.command: problem for step in chosen if (problem := walk.carry_out(step))}
        walk.say(f"\n{len(chosen) - len(problems)} of {len(chosen)} commands did what they should\n")
        for command, problem in problems.items():
            walk.say(f"  {command}: {problem}\n")
    print(f"the transcript is {into / 'transcript.txt'}; remove {into} when you have read it")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
