"""`make mutants`: how many of the recorded mutants of cores and policies the tests kill.

`sample.jsonl` records each mutant as one changed line of one function, so that it is found again where code
has moved. Each runs in a fork of a process that has imported the service's tests: the function around the
line gets the mutated code, and no file changes. A line that runs at import is compiled into its module, in a
fork that has imported nothing of the project. The tests of the module's service run, those nearest by imports
first, until one fails, or `CPU_S` seconds of processor time have passed.

A mutant is killed (a test fails), survives, or is gone (its line no longer exists). At the end every test
that killed one runs on the unchanged code, where it must pass.
"""

import argparse
import gc
import importlib
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = Path(__file__).parent / "sample.jsonl"
CPU_S = 20.0
_NEAREST = 6
_FARTHEST_IMPORTS = 3
_WHICH = "not stack and not slow and not gpu and not vllm"
_IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import \(?([^#\n]*)|import ([\w.]+))", re.M)
KILLED, SURVIVED, GONE = "killed", "survived", "gone"


@dataclass(frozen=True)
class Mutant:
    """One changed line of one function."""

    file: str
    function: str
    nth: int
    """Of the lines in the file with this text, from 0."""
    was: str
    becomes: str

    def found(self) -> tuple[Path, str] | None:
        """The file and its mutated text; the line may have moved to another file of the same service."""
        home = ROOT / self.file
        others = sorted((ROOT / "services" / self.service).rglob("*.py"))
        for path in (home, *others):
            text = path.read_text() if path.exists() else ""
            if f"def {self.function}(" not in text and f"class {self.function}" not in text:
                continue
            lines = text.split("\n")
            same = [number for number, line in enumerate(lines) if line.strip() == self.was.strip()]
            if same:
                at = same[min(self.nth, len(same) - 1)]
                indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
                lines[at] = indent + self.becomes.lstrip()
                return path, "\n".join(lines)
        return None

    @property
    def service(self) -> str:
        return self.file.split("/")[1]


class _Nearness:
    """How many imports lie between a test file and a module."""

    def __init__(self) -> None:
        self._imports: dict[str, set[str]] = {}
        for folder in ("services", "shared", "sim", "tests"):
            for path in (ROOT / folder).rglob("*.py"):
                self._imports[_dotted(path)] = set(_imported(path.read_text()))

    def tests_of(self, module: Path, service: str) -> list[str]:
        """Test files of the service that reach the module, the nearest first."""
        wanted, found = _dotted(module), []
        for path in sorted((ROOT / "tests" / "services" / service).rglob("test_*.py")):
            distance = self._distance(_dotted(path), wanted)
            if distance is not None:
                found.append((distance, str(path)))
        return [path for _, path in sorted(found)]

    def _distance(self, start: str, wanted: str) -> int | None:
        seen, waiting = {start}, deque([(start, 0)])
        while waiting:
            name, distance = waiting.popleft()
            if name == wanted:
                return distance
            if distance < _FARTHEST_IMPORTS:
                for other in self._imports.get(name, set()) - seen:
                    seen.add(other)
                    waiting.append((other, distance + 1))
        return None


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(text: str) -> Iterator[str]:
    for module, names, plain in _IMPORT.findall(text):
        yield module or plain
        yield from (
            f"{module}.{name.split()[0]}" for name in names.split(",") if module and name.strip(" ()")
        )


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The outermost functions and the methods of a compiled module."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_function = inner.co_flags & 2  # CO_NEWLOCALS: a class's body has it not
            yield from (inner,) if is_function else _functions(inner)


def _patch(module: Path, text: str) -> bool:
    """Give the loaded functions of `module` their code in `text`; False where no loaded one differs."""
    before = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _functions(compile(module.read_text(), str(module), "exec"))
    }
    changed = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _functions(compile(text, str(module), "exec"))
        if before.get((code.co_qualname, code.co_firstlineno)) != code
    }
    found = False
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == str(module):
            code = changed.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if code is not None:
                function.__code__ = code
                found = True
    return found


def _compile_at_import(module: Path, text: str) -> None:
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        return compile(text, self.path, "exec") if self.path == str(module) else original(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def _judge(tests: Sequence[str]) -> str:
    """The first of these tests that fails; empty where all pass."""
    import pytest

    class Watch:
        failed = ""

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                self.failed = self.failed or report.nodeid

        pytest_collectreport = pytest_runtest_logreport

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            if time.process_time() > CPU_S:
                raise pytest.exit.Exception("enough")

    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--timeout=120"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    for part in (tests[:_NEAREST], tests[_NEAREST:]):
        watch = Watch()
        if not part or time.process_time() > CPU_S:
            continue
        code = pytest.main([*words, "-m", _WHICH, *part], plugins=[watch])
        if watch.failed:
            return watch.failed
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            return "the harness: pytest ended"
    return ""


def _start(module: Path, text: str, tests: Sequence[str], told: Path, is_loaded: bool) -> int:
    """Returns the fork's process id; it writes to `told` which test fails, or nothing. It exits with 2 where
    `text` changes no loaded function.
    """
    child = os.fork()
    if child:
        return child
    failed = "the harness: it was not started"
    try:
        if is_loaded and not _patch(module, text):
            os._exit(2)
        if not is_loaded:
            _compile_at_import(module, text)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            failed = _judge(tests)
    except BaseException as error:
        failed = f"the harness: {error!r}"
    finally:
        told.write_text(failed)
        os._exit(1 if failed else 0)


def _load_tests(service: str) -> None:
    import pytest

    for path in sorted((ROOT / "tests" / "services" / service).rglob("test_*.py")):
        if "stack" not in path.parts[len(ROOT.parts) + 3 :]:
            with suppress(pytest.skip.Exception):
                importlib.import_module(_dotted(path))


def _run_service(
    service: str | None, numbers: Sequence[int], mutants: Sequence[Mutant], n: int, told: Path
) -> None:
    """Judge these mutants, `n` at once, and write each fate to `told`. `service`: its tests are loaded."""
    nearness, running, fates = _Nearness(), dict[int, int](), (SURVIVED, KILLED, "at import")

    def reap() -> None:
        child, status = os.wait()
        at = running.pop(child)
        fate = fates[os.waitstatus_to_exitcode(status)] if os.WIFEXITED(status) else KILLED
        (told / f"{at}.fate").write_text(fate)
        print(f"{len(list(told.glob('*.fate'))):4}  {fate:9} {at:3} {mutants[at].file}", flush=True)

    if service is not None:
        _load_tests(service)
    for number in numbers:
        found = mutants[number].found()
        tests = nearness.tests_of(found[0], mutants[number].service) if found else []
        if found is None or not tests:
            (told / f"{number}.fate").write_text(SURVIVED if found else GONE)
            continue
        while len(running) >= n:
            reap()
        running[_start(*found, tests, told / str(number), service is not None)] = number
    while running:
        reap()


def run(mutants: Sequence[Mutant], processes: int, folder: Path) -> dict[int, str]:
    """Each mutant's fate by its place in the sample; files in `folder` name the tests that killed."""

    def fates() -> dict[int, str]:
        return {int(path.stem): path.read_text() for path in folder.glob("*.fate")}

    def in_a_fork(service: str | None, numbers: list[int]) -> None:
        child = os.fork()
        if not child:
            _run_service(service, numbers, mutants, processes, folder)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"the tests of {service} could not be loaded")

    for service in sorted({mutant.service for mutant in mutants}):
        in_a_fork(service, [n for n, mutant in enumerate(mutants) if mutant.service == service])
    in_a_fork(None, [n for n, fate in fates().items() if fate == "at import"])
    return fates()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Mutants of cores and policies."
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only mutants whose file has this in its path"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only one mutant in N")
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="write each mutant with its fate, as JSON lines"
    )
    arguments = parser.parse_args()
    records = [json.loads(line) for line in SAMPLE.read_text().splitlines()][:: arguments.every]
    records = [record for record in records if arguments.only in record["file"]]
    mutants = [Mutant(r["file"], r["function"], r["nth"], r["was"], r["is"]) for r in records]
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"
    for name in ("msgspec", "numpy", "pytest", "torch"):
        __import__(name)
    with tempfile.TemporaryDirectory() as folder:
        fates = run(mutants, arguments.processes, Path(folder))
        killers = sorted({path.read_text() for path in Path(folder).iterdir() if not path.suffix} - {""})
    print(f"{len(killers)} tests killed; now on the unchanged code:", flush=True)
    checked = subprocess.run([sys.executable, "-m", "pytest", "-q", "--", *killers], check=False)
    counts = Counter(fates.values())
    for number, mutant in enumerate(mutants):
        if fates[number] != KILLED:
            print(f"{fates[number]}: {mutant.file}:{mutant.function}\n  - {mutant.was}\n  + {mutant.becomes}")
    if arguments.into:
        lines = (
            json.dumps({**record, "fate": fates[n]}, ensure_ascii=False) for n, record in enumerate(records)
        )
        arguments.into.write_text("\n".join(lines) + "\n")
    there = counts[KILLED] + counts[SURVIVED]
    print(f"killed_share {counts[KILLED] / max(there, 1):.3f} of {there} mutants; {counts[GONE]} are gone")
    return checked.returncode


if __name__ == "__main__":
    sys.exit(main())
