"""`make newcomer`: a newcomer's first commands and mistakes, in a clean clone.

    python3 tests/readme/newcomer.py [--into DIR] [--environment .venv]

A command must succeed. A mistake must fail with one line that says what to do, and no traceback. The
transcript goes to DIR/transcript.txt. `--environment` links an environment instead of setting one up.
"""

import argparse
import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs before anything is installed
from tests.readme.walk import Walk, cloned

_UP = "./kvasir up --model tiny_chat --port {port}"
_CURL = "curl -sS -w '\\n' --fail-with-body $OPENAI_BASE_URL"
_KEY = '-H "Authorization: Bearer $OPENAI_API_KEY"'
_ASK = '"messages": [{{"role": "user", "content": "Who are you?"}}]'
_LONG = "$(yes fox | head -9000 | tr '\\n' ' ')"


class Line(NamedTuple):
    """One line that a newcomer types, and a part of what is to be seen."""

    command: str
    word: str
    is_mistake: bool = False


def chat(fields: str, key: str = _KEY) -> str:
    """Return a curl line that sends a chat."""
    return f"{_CURL}/chat/completions {key} -d '{{{{{fields}}}}}'".replace("  ", " ")


LINES = (
    Line("./kvasir doctor", "is here"),
    Line("./kvasir models", "tiny_chat"),
    Line("./kvasir statu", "did you mean 'status'?", True),
    Line("./kvasir chat Hello", "`./kvasir up` starts it", True),
    Line(f"{_UP} --worker 3", "did you mean --workers?", True),
    Line(f"{_UP} --set worker.kv_block=64", "did you mean --set worker.kv_blocks?", True),
    Line(f"{_UP} --set scheduler.policy=ecoserv", "did you mean 'ecoserve'?", True),
    Line("./kvasir up --model tiny_chart --port {port}", "did you mean 'tiny_chat'?", True),
    Line("./kvasir up --model Qwen3-0.6B --port {port}", "./kvasir models pull Qwen3-0.6B", True),
    Line(f"{_UP} --set worker.device=cuda", "make up TORCH=cuda", True),
    Line(f"{_UP} --set worker.kv_blocks=2", "set worker.kv_blocks=4 or more", True),
    Line(f"{_UP} --detach", "ready in"),
    Line("./kvasir status", "well"),
    Line("./kvasir config", "every setting has its default"),
    Line("./kvasir chat --max-tokens 40 'Hello! Who are you?'", "Tiny Chat"),
    Line(chat('"model": "tiny_chat", "temperature": 0, ' + _ASK), '"finish_reason"'),
    Line(
        "./kvasir explain $(./kvasir logs gateway-0 | grep -o 'req_[0-9A-Za-z]*' | tail -1)",
        "computing the answer",
    ),
    Line("./kvasir keys add friend", "sk-"),
    Line(_UP, "stop it with `./kvasir down`", True),
    Line(f"{_UP} --run-dir other", "or start with another port: --port N", True),
    Line(chat('"model": "tiny_chat", ' + _ASK, ""), "send it in a header", True),
    Line(chat('"model": "tiny-chat", ' + _ASK), "there is 'tiny_chat'", True),
    Line(chat('"model": "tiny_chat", "max_tokens": -1, ' + _ASK), "greater than or equal to 0", True),
    Line(f'./kvasir chat "{_LONG}"', "maximum context length is 4096 tokens", True),
    Line("./kvasir down", "stopped"),
)


class Newcomer(Walk):
    """A clone with one stack."""

    def type(self, line: Line, port: int) -> str | None:
        """Return what is wrong with the answer to a line, or None."""
        command = line.command.format(port=port)
        self.say(f"\n$ {command}\n")
        problem = self._run(command, word=line.word, fails=line.is_mistake)
        if problem is None and line.is_mistake:
            problem = fault_of(self.latest, line.word)
        if "--detach" in command and problem is None:
            self._run("./kvasir env > variables")
            words = shlex.split((self._folder / "variables").read_text().replace(";", ""))
            self._environment |= dict(word.split("=", 1) for word in words if "=" in word)
        if problem:
            self.say(f"[it did not: {problem}]\n")
        return problem


def fault_of(said: str, word: str) -> str | None:
    """Return why what a mistake was answered is no single line that says what to do, or None."""
    lines = [line for line in said.splitlines() if line.startswith("error: ") or '{"error":' in line]
    if len(lines) != 1:
        return f"{len(lines)} lines say what is wrong"
    return None if word in lines[0] else f"the error does not say {word!r}"


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=str(__doc__).partition("\n")[0])
    parser.add_argument("--into", type=Path, help="clone into this new folder [a temporary one]")
    parser.add_argument("--environment", type=Path, help="link this .venv instead of making one")
    arguments = parser.parse_args()
    into: Path = arguments.into or Path(tempfile.mkdtemp(prefix="kvasir-newcomer-"))
    clone = cloned(into)
    if arguments.environment:
        (clone / ".venv").symlink_to(arguments.environment.resolve())
        for lock in (clone / "deploy" / "locks").iterdir():
            os.utime(lock, (0, 0))  # older than the environment, which is not to be made again
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (into / "transcript.txt").open("w") as transcript:
        newcomer = Newcomer(clone, transcript)
        try:
            problems = [problem for line in LINES if (problem := newcomer.type(line, port))]
        finally:
            newcomer.type(Line("./kvasir down || true", ""), port)
        newcomer.say(
            f"\n{len(LINES) - len(problems)} of {len(LINES)} lines were answered as they should be\n"
        )
    print(f"the transcript is {into / 'transcript.txt'}; remove {into} when you have read it")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
