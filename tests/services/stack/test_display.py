"""What people are shown while a stack starts."""

import io
import json
import shlex

from rich.console import Console

from services.stack import display
from services.stack.children import Backoff, Child, ChildSpec, ChildState
from services.stack.display import StartDisplay, curl_line


def children() -> list[Child]:
    specs = [ChildSpec(name, ("true",), {}) for name in ("nats", "worker-0")]
    ready, late = (Child(spec, Backoff()) for spec in specs)
    ready.state, late.obstacle = ChildState.READY, "loads its model"
    return [ready, late]


def test_plain_lines_name_who_is_late() -> None:
    console = Console(file=io.StringIO())
    with StartDisplay(console, children()) as shown:
        shown.tick()
        shown._shown_s -= display._PLAIN_EVERY_S
        shown.tick()
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "starting nats, worker-0"
    assert lines[1].endswith("waiting for worker-0 (loads its model)")
    assert len(lines) == 2


def test_a_terminal_gets_a_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with StartDisplay(console, children()) as shown:
        shown._shown_s -= 1.0
        shown.tick()
    assert isinstance(console.file, io.StringIO)
    assert "loads its model" in console.file.getvalue()


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:1", "sk-x", "tiny"))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:1/v1/chat/completions"]
    assert "Authorization: Bearer sk-x" in words
    assert json.loads(words[-1])["stream"] is True
