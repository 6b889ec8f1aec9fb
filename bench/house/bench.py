"""`python -m bench house`: how hard the code is to enter, in counts without timings.

Static (`static.py`): lines, words, the share of imports, splinters, names with several meanings. Live: files
and functions that run in a stack of two workers during a chat request of 16 tokens.
"""

import json
import os
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from bench.house import ceilings, static
from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT
from bench.kit.stacks import start_stack
from shared.errors import InternalError

_TRACER = Path(__file__).parent / "tracer"
_READY_S = 180.0
_ANSWER_S = 120.0
_WRITTEN_S = 20.0
_QUIET_S = 3.0
_TIMERS_S = 11.0
"""Longer than the period of any timer, so that what a timer runs is not taken for the request's."""
_BORROWING = {
    "worker.kv_blocks": "48",
    "worker.lending.borrow": "true",
    "worker.lending.max_lent_fraction": "1",
    "worker.lending.keep_free_fraction": "0",
    "worker.lending.low_fraction": "0",
    "worker.lending.high_fraction": "0",
    "worker.prefix_cache.enabled": "false",
}
_BORROWED_ROOMS = ("services/worker/", "services/ledger/")
_LONG_PROMPT = " ".join(["Once upon a time there was a fox."] * 100)
_SHORT_PROMPT = "Hello! Who are you?"

Function = tuple[str, str]
"""(file, qualified name)"""


_GENERATED = {ROOT / "docs" / name for name in ("fields.md", "papers.md", "settings.md")}
"""Written by a command, not by a person."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--no-live", action="store_true", help="count the source only; start no stack")
    parser.add_argument(
        "--check", action="store_true", help="fail when a figure is above its ceiling in house.toml"
    )


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError with `--check` if a figure is above its ceiling."""
    house = ceilings.read(ROOT)
    figures, tables = _source()
    if not context.arguments.no_live:
        chat = _trace(context, "chat", {}, _SHORT_PROMPT, 16, 64)
        borrowed = _trace(context, "borrowed", _BORROWING, _LONG_PROMPT, 8, 1000)
        rooms = {file for file, _ in borrowed if file.startswith(_BORROWED_ROOMS)}
        off = house.off_files(file for file, _ in chat)
        figures |= {
            "request_files": len({file for file, _ in chat}),
            "request_functions": len(chat),
            "borrowed_block_files": len(rooms),
            "off_files": sum(len(files) for files in off.values()),
        }
        unused = [(feature, " ".join(files)) for feature, files in off.items() if files]
        tables.append(Table("features that a plain chat touches unasked", ["feature", "files"], unused))
        tables.append(_by_folder("a chat request of 16 tokens", chat))
        tables.append(_by_folder("a prompt that borrows", borrowed))
        for name, functions in (("chat", chat), ("borrowed", borrowed)):
            for file, function in sorted(functions):
                context.record({"file": file, "function": function}, f"{name}.jsonl")
    if context.arguments.check and (excesses := house.excesses(figures)):
        raise InternalError("; ".join(excesses))
    return Outcome(figures=figures, failures=0, tables=tables)


def _source() -> tuple[dict[str, float], list[Table]]:
    services = static.modules(ROOT, ["services"])
    live = static.modules(ROOT, ["services", "shared"])
    names = static.homonyms(static.modules(ROOT, ["services", "shared", "sim"]))
    splinters = static.splinters(services)
    worker = static.modules(ROOT, ["services/worker"])
    figures = {
        "splinters": float(len(splinters)),
        "homonyms": float(len(names)),
        "import_share": static.import_share(live),
        "files_worker": float(len(worker)),
        "lines_worker": float(sum(module.lines for module in worker)),
        "lines_services_shared": float(static.lines(ROOT, ["services", "shared"])),
        "lines_tests": float(static.lines(ROOT, ["tests"])),
        "lines_bench": float(static.lines(ROOT, ["bench"])),
        "words_docs": float(static.words(sorted({*(ROOT / "docs").rglob("*.md")} - _GENERATED))),
        "words_readme": float(static.words([ROOT / "README.md"])),
        "root_entries": float(static.entries(ROOT)),
    }
    tables = [
        Table("modules with one importer", ["module", "lines"], [(one.name, one.lines) for one in splinters]),
        Table(
            "names with several meanings",
            ["name", "modules"],
            [(name, " ".join(homes)) for name, homes in names.items()],
        ),
        _rooms(worker),
    ]
    return figures, tables


def _rooms(worker: Sequence[static.Module]) -> Table:
    """The worker's own files and those of its folders."""
    files, lines = Counter[str](), Counter[str]()
    for module in worker:
        room = "/".join(module.name.split(".")[2:-1]) or "(itself)"
        files[room] += 1
        lines[room] += module.lines
    return Table(
        "the worker", ["room", "files", "lines"], [(room, files[room], lines[room]) for room in sorted(files)]
    )


def _trace(
    context: Context,
    name: str,
    settings: Mapping[str, str],
    prompt: str,
    max_tokens: int,
    context_tokens: int,
) -> set[Function]:
    """Return the functions that run while a stack serves one request after a first one.

    The request is sent once the gateway accepts `context_tokens`, because lenders announce themselves late.
    """
    folder = context.run_dir.resolve() / f"trace-{name}"
    folder.mkdir()
    (folder / "flag").write_bytes(b"\0")
    path = os.pathsep.join(filter(None, [str(_TRACER), os.environ.get("PYTHONPATH")]))
    environ = {"PYTHONPATH": path, "KVASIR_TRACE": str(folder)}
    context.say(f"tracing: {name}")
    with start_stack(folder / "stack", settings, workers=2, environ=environ) as stack:
        port, key = stack.target.port, stack.target.key
        stack.tree.await_(lambda: _longest(port, key) >= context_tokens, _READY_S)
        _chat(port, key, "Good morning! " + prompt, max_tokens)
        on_timers = _window(folder, lambda: time.sleep(_TIMERS_S))
        return _window(folder, lambda: _chat(port, key, prompt, max_tokens)) - on_timers


def _longest(port: int, key: str) -> int:
    """Return the tokens of prompt and answer that the gateway accepts now."""
    url = f"http://127.0.0.1:{port}/v1/models"
    models = httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=_ANSWER_S).json()["data"]
    return max(int(row.get("max_model_len") or 0) for row in models)


def _chat(port: int, key: str, prompt: str, max_tokens: int) -> None:
    """Read a streamed chat and await what follows its end. Raises InternalError if refused or broken off."""
    body = {
        "model": TINY_CHAT.name,
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": prompt}],
    }
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=_ANSWER_S,
    )
    if answer.status_code != 200 or "[DONE]" not in answer.text:
        raise InternalError(f"the traced chat failed: {answer.status_code} {answer.text[-300:]}")
    time.sleep(_QUIET_S)


def _raise_flag(folder: Path, value: int) -> None:
    with (folder / "flag").open("r+b") as flag:
        flag.write(bytes([value]))


def _window(folder: Path, passes: Callable[[], None]) -> set[Function]:
    """Return the functions that all processes ran during `passes`. Raises InternalError if none reports."""
    for part in folder.glob("*.json"):
        part.unlink()
    _raise_flag(folder, 1)
    passes()
    _raise_flag(folder, 2)
    deadline_s = time.monotonic() + _WRITTEN_S
    before: list[Path] = []
    while time.monotonic() < deadline_s:
        parts = sorted(folder.glob("*.json"))
        if parts and parts == before:
            found = {(file, name) for part in parts for file, name in json.loads(part.read_text())}
            return {one for one in found if not one[0].startswith(("bench/", ".venv"))}
        before = parts
        time.sleep(1.0)
    raise InternalError(f"no process wrote what it ran: see {folder / 'stack.log'}")


def _by_folder(title: str, functions: Sequence[Function] | set[Function]) -> Table:
    files: Counter[str] = Counter("/".join(file.split("/")[:2]) for file in {file for file, _ in functions})
    calls: Counter[str] = Counter("/".join(file.split("/")[:2]) for file, _ in functions)
    rows = [(folder, count, calls[folder]) for folder, count in files.most_common()]
    return Table(title, ["folder", "files", "functions"], rows)
