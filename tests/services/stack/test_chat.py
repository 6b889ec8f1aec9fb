"""The chat client against a real HTTP server that answers like the gateway."""

import http.server
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from services.stack.chat import ChatFailed, chat, contents
from services.stack.rundir import RunDirectory
from tests.services.stack.commands import ROOT


class Gateway(http.server.BaseHTTPRequestHandler):
    """Streams `answer` word by word to whoever has a key; remembers what it was asked."""

    asked: ClassVar[list[dict[str, Any]]] = []
    answer: ClassVar[str] = "a short answer"
    failure: ClassVar[int | None] = None
    endless: ClassVar[bool] = False
    hung_up: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"key": self.headers["Authorization"]})
        if self.failure:
            self._send(self.failure, json.dumps({"error": {"message": "too busy"}}))
            return
        if self.endless:
            self._drip()
            return
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": word}}]} for word in self.answer.split(" ")]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]))

    def _drip(self) -> None:
        """Words until the client is gone, for ten seconds at most."""
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(500):
                self.wfile.write(b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n')
                time.sleep(0.02)
        except OSError:
            self.hung_up.set()

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run directory that looks like that of a live stack whose gateway is ours."""
    Gateway.asked.clear()
    Gateway.failure, Gateway.endless = None, False
    Gateway.hung_up.clear()
    server = http.server.HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    run = RunDirectory(tmp_path)
    run.create()
    assert run.acquire()
    run.write_state({"url": f"http://127.0.0.1:{server.server_port}"})
    yield run
    run.release()
    server.shutdown()
    thread.join()
    server.server_close()


def console() -> Console:
    return Console(file=io.StringIO())


def test_one_question(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 9, "system": "be brief"}
    assert (
        chat(RunDirectory(run.path), console(), ["hello"], **options) == 0
        and capsys.readouterr().out == "ashortanswer\n"
    )
    (asked,) = Gateway.asked
    said = [(message["role"], message["content"]) for message in asked["messages"]]
    assert said == [("system", "be brief"), ("user", "hello")]
    assert (asked["model"], asked["stream"]) == ("tiny", True)
    assert (asked["temperature"], asked["max_tokens"]) == (0.0, 9)
    assert asked["key"] == f"Bearer {run.credentials().api_key}"


def test_turns_remember_until_told_to_forget(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "", "two", "/new", "three", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert chat(RunDirectory(run.path), console()) == 0
    contents_asked = [[m["content"] for m in asked["messages"]] for asked in Gateway.asked]
    assert contents_asked == [["one"], ["one", "ashortanswer", "two"], ["three"]]


def test_a_refused_turn_is_shown_and_forgotten(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = console()

    def say(_: str) -> str:
        if not Gateway.asked:
            Gateway.failure = 429
            return "one"
        if Gateway.failure:
            Gateway.failure = None
            return "two"
        raise EOFError

    monkeypatch.setattr("builtins.input", say)
    assert chat(RunDirectory(run.path), shown) == 0 and isinstance(shown.file, io.StringIO)
    assert "429: too busy" in shown.file.getvalue()
    assert [m["content"] for m in Gateway.asked[1]["messages"]] == ["two"]


def test_ctrl_c_ends_the_answer_not_the_program(run: RunDirectory) -> None:
    Gateway.endless = True
    words = [sys.executable, "-m", "services", "chat", "--run-dir", str(run.path)]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("talk\n")
        process.stdin.flush()
        said = ""
        while "word word" not in said:
            part = process.stdout.read(1)
            assert part, "it ended"
            said += part
        process.send_signal(signal.SIGINT)
        assert Gateway.hung_up.wait(10.0), "the gateway was not told"
        process.stdin.write("/exit\n")
        process.stdin.flush()
        assert process.wait(timeout=10.0) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['data: {"error":{"message":"worker lost"}}'], "worker lost"),
        (['data: {"choices":[]}', ""], r"without \[DONE\]"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(lines: list[str], message: str) -> None:
    with pytest.raises(ChatFailed, match=message):
        list(contents(iter(lines)))
