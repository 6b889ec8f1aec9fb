"""Output of `up`: a live table on a terminal, otherwise plain lines."""

import contextlib
import shlex
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.stack.rundir import DEFAULT_RUN_DIR, ROOT, RunDirectory
from services.stack.supervisor import Child, ChildState
from shared.errors import ConfigError

_REFRESH_S = 0.1
_PLAIN_EVERY_S = 5.0
_FEW = 2
"""Number of late children up to which a line also shows each obstacle."""


class StartDisplay:
    """Shows the children still awaited. Use it as a context, and call `tick` often."""

    def __init__(self, console: Console, children: Iterable[Child]) -> None:
        self._console = console
        self._children = list(children)
        self._began_s = time.monotonic()
        self._shown_s = self._began_s
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> "StartDisplay":
        names = ", ".join(child.spec.name for child in self._children)
        self._console.print(f"starting {names}", highlight=False)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            if self._live:
                self._live.stop()

    def tick(self) -> None:
        now_s = time.monotonic()
        every_s = _REFRESH_S if self._live else _PLAIN_EVERY_S
        if now_s - self._shown_s < every_s:
            return
        self._shown_s = now_s
        with contextlib.suppress(OSError):  # the terminal is gone
            self._show(now_s)

    def _show(self, now_s: float) -> None:
        if self._live:
            self._live.update(self._table(now_s - self._began_s), refresh=True)
        else:
            late = [c for c in self._children if c.state is not ChildState.READY]
            names = [child.spec.name for child in late]
            if len(late) <= _FEW:
                names = [f"{child.spec.name} ({_word(child)})" for child in late]
            elapsed = f"{now_s - self._began_s:.0f} s"
            self._console.print(f"{elapsed}: waiting for {', '.join(names)}", highlight=False)

    def _table(self, elapsed_s: float) -> Table:
        table = Table(box=None, padding=(0, 2), show_header=False)
        for child in self._children:
            ready = child.state is ChildState.READY
            mark = Text("✓", "green") if ready else Text("…", "yellow")  # `say` prints it without markup
            table.add_row(mark, child.spec.name, "" if ready else Text(_word(child), "dim"))
        table.add_row("", Text(f"{elapsed_s:.0f} s", "dim"), "")
        return table


def _word(child: Child) -> str:
    return child.obstacle if child.obstacle and child.state is ChildState.STARTING else str(child.state)


def say(console: Console, text: str) -> None:
    """Print `text` without wrapping, colours or markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", *, right: Collection[str] = ()
) -> Table:
    """Return a table without frames; `right` are the headings of columns that are aligned to the right."""
    made = Table(title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    made.box = SIMPLE_HEAD
    for heading in headings:
        made.add_column(heading, overflow="fold", justify="right" if heading in right else "left")
    for row in rows:
        made.add_row(*row)
    return made


def command_line(words: str, run: RunDirectory) -> str:
    """Return the shell command for these words and this run directory."""
    where = "" if run.path == DEFAULT_RUN_DIR else f" --run-dir {shlex.quote(str(run.path))}"
    return f"{_program()} {words}{where}"


def nothing_runs(run: RunDirectory) -> str:
    """Say that there is no stack, and how to start it."""
    return f"nothing runs from {run.path}; `{command_line('up', run)}` starts it"


def running_state(run: RunDirectory) -> dict[str, Any]:
    """Return the state of the stack that runs. Raise ConfigError if none does."""
    pid, state = run.holder(), run.read_state()
    if pid is None or state.get("pid") != pid:
        raise ConfigError(nothing_runs(run))
    return state


def _program() -> str:
    script = ROOT / "kvasir"
    found = shutil.which(script.name)
    if found is not None and Path(found).resolve() == script:
        return script.name
    return f"./{script.name}" if Path.cwd() == ROOT else shlex.quote(str(script))


def access_text(url: str, key: str, model: str, run: RunDirectory) -> str:
    """Return URL, key and usage examples. It contains the key, so do not log it."""
    messages = '[{"role":"user","content":"Tell me about the sea."}]'
    body = f'{{"model":"{model}","stream":true,"messages":{messages}}}'
    hints = {"talk to it": "chat", "look inside": "status", "read its logs": "logs", "end it": "down"}
    hint_lines = "\n".join(f"  {what:15}{command_line(word, run)}" for what, word in hints.items())
    return f"""\
  URL  {url}
  key  {key}
  chat {url}/ui/chat#key={key}
  page {url}/ui#key={key}

curl -N {url}/v1/chat/completions -H 'Authorization: Bearer {key}' \
-H 'Content-Type: application/json' -d '{body}'

{hint_lines}
"""
