"""The commands in the docs: what a page tells its reader to type, and what becomes of it in tests.

A block of `sh` is run, page by page, in a copy of the repository, unless a comment before it says otherwise:
`<!-- run by FILE -->` names the test that does it, `<!-- not run: REASON -->` says why nobody does. A page of
`docs/benchmarks/` is different: its benches are parsed with their flags, and run with `--quick`.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(?:<!-- (.*?) -->\n)?^```sh\n(.*?)^```", re.M | re.S)
_BENCH = re.compile(r"python -m bench ([a-z][a-z-]*)((?: (?:[^\n`|&#\\]|\\\n)*)?)")
FOREGROUND = re.compile(r"(?:python -m services|kvasir) up\b")


@dataclass(frozen=True)
class Block:
    """Lines of one `sh` block, without what is behind `#`."""

    page: str
    lines: tuple[str, ...]
    note: str
    """What the comment before it says; empty: it is run here."""

    @property
    def runner(self) -> str:
        """The test that runs it, or empty."""
        return self.note.removeprefix("run by ") if self.note.startswith("run by ") else ""

    @property
    def reason(self) -> str:
        """Why it is not run, or empty."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""


def pages() -> list[str]:
    """README, services' READMEs and the docs, without decisions, which tell what was, and benchmarks."""
    found = [path for path in DOCS.rglob("*.md") if path.parent.name not in ("decisions", "benchmarks")]
    found += [ROOT / "README.md", *(ROOT / "services").glob("*/README.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(page, tuple(_lines(found[2])), (found[1] or "").strip()) for found in _BLOCK.finditer(text)]


def _lines(text: str) -> list[str]:
    """One for each command: those that go on are joined, remarks left out."""
    joined, quotes = [""], 0
    for line in text.splitlines():
        joined[-1] += re.sub(r"\s{2,}#.*$", "", line)
        quotes += line.count("'")
        if joined[-1].endswith("\\"):
            joined[-1] = joined[-1][:-1]
        elif quotes % 2:
            joined[-1] += "\n"
        else:
            joined.append("")
    return [line.strip() for line in joined if line.strip() and not line.startswith("#")]


def benches_of(page: str) -> list[tuple[str, str]]:
    """Every bench that a page names with its flags, those in brackets included."""
    found = []
    for name, rest in _BENCH.findall((ROOT / page).read_text()):
        words = re.sub(r"[\[\]…]|\\\n", " ", rest)
        found.append((name, " ".join(words.split())))
    return found


def copied(folder: Path) -> Path:
    """A copy of the repository as it is, with this one's virtual environment: its `.run` is its own."""
    copy = folder / "kvasir"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").mkdir()
    for entry in (ROOT / ".venv").resolve().iterdir():
        if entry.name not in (".runtime", ".dev"):
            (copy / ".venv" / entry.name).symlink_to(entry)
    for mark in (".runtime", ".dev"):
        (copy / ".venv" / mark).touch()
    return copy


class Reader:
    """Types commands in a copy of the repository, with a stack on a port of its own."""

    def __init__(self, copy: Path, port: int) -> None:
        self.copy, self._port = copy, port
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self._environment = {
            **kept,
            "HOME": str(copy.parent),
            "TERM": "dumb",
            "COLUMNS": "80",
            "KVASIR_STACK__PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }

    def types(self, command: str, *, timeout_s: float = 600.0) -> str:
        """What it says. Fails the test when it fails, or shows a traceback."""
        typed = re.sub(r"(^|\s)python (?=-m |docs/)", r"\1.venv/bin/python ", command)
        typed = typed.replace("127.0.0.1:8080", f"127.0.0.1:{self._port}")
        done = subprocess.run(
            ["bash", "-c", f"set -e -o pipefail\n{typed}"],
            cwd=self.copy,
            env=self._environment | self._key(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"$ {typed}\n{done.stdout}"
        assert "Traceback" not in done.stdout, f"$ {typed}\n{done.stdout}"
        return done.stdout

    def _key(self) -> dict[str, str]:
        file = self.copy / ".run" / "credentials.json"
        if not file.exists():
            return {}
        found = re.search(r'"api_key": *"([^"]+)"', file.read_text())
        return {"KEY": found[1]} if found else {}
