"""A proxy between a client and the stack. It makes one request call a tool, and keeps what passes.

A model of 6 million parameters calls no tool by itself. The proxy adds `tool_choice`, with the tool's name,
to the first request that offers the tool. Everything else passes unchanged, in both directions.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.clients import sealed
from tests.clients.sealed import SEAL

SEALED = Path(sealed.__file__)
PORT = 8080
"""Of 127.0.0.1 in a network where nothing else listens."""
START_S, ANSWER_S = 20, 300


@dataclass
class Passed:
    """A request, and what the stack answered it."""

    path: str
    body: str
    forced: str = ""
    """Name of the tool that it was made to call."""
    status: int = 0
    answer: bytes = b""


@dataclass
class Between:
    """The proxy between one client and `gateway`; `tool`: how the name of the tool ends."""

    gateway: str
    tool: str
    passed: list[Passed] = field(default_factory=list)

    def run(self, command: Sequence[str | Path], env: Mapping[str, str], cwd: Path, limit_s: float) -> str:
        """Return what `command` writes, where the proxy is all it can reach. Its exit status has to be 0."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            words = [*SEAL, sys.executable, SEALED, str(theirs.fileno()), str(PORT), *command]
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            theirs.close()
            ours.settimeout(START_S)
            _, listening, _, _ = socket.recv_fds(ours, 1, 1)
        assert listening, process.communicate(timeout=START_S)[0]
        server = _served(self, socket.socket(fileno=listening[0]))
        try:
            output, _ = process.communicate(timeout=limit_s)
        finally:
            process.kill()
            process.wait(START_S)
            server.shutdown()
            server.server_close()
        assert process.returncode == 0, f"{command[0]}: {process.returncode}\n{output}"
        return output

    def forced(self, path: str, body: str) -> tuple[str, str]:
        """The body with its `tool_choice`, and the tool's name; or the body and nothing."""
        if not body or any(each.forced for each in self.passed):
            return body, ""
        asked = json.loads(body)
        name = next((name for name in names_of(asked.get("tools") or ()) if name.endswith(self.tool)), "")
        if not name:
            return body, ""
        choice: dict[str, Any] = {"type": "function", "name": name}
        if path.startswith("/v1/messages"):
            choice["type"] = "tool"
        elif path.startswith("/v1/chat"):
            choice = {"type": "function", "function": {"name": name}}
        return json.dumps(asked | {"tool_choice": choice}), name


def names_of(tools: Any) -> Iterator[str]:
    """Names of functions, on any of the three APIs; those of a namespace in full."""
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from (f"{tool['name']}__{name}" for name in names_of(tool["tools"]))
        else:
            yield tool.get("name") or tool.get("function", {}).get("name", "")


def _served(link: Between, listening: socket.socket) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", PORT), _handler(link), bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _handler(link: Between) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass("")

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers.get("content-length", 0))).decode())

        do_HEAD = do_GET

        def _pass(self, body: str) -> None:
            sent, tool = link.forced(self.path, body)
            seen = Passed(self.path, body, tool)
            link.passed.append(seen)
            upstream = http.client.HTTPConnection(urlsplit(link.gateway).netloc, timeout=ANSWER_S)
            left_out = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
            upstream.request(self.command, self.path, sent.encode() or None, headers)
            answer = upstream.getresponse()
            seen.status = answer.status
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := answer.read1(65536):
                seen.answer += piece
                self.wfile.write(piece)
            upstream.close()

        def log_message(self, *_words: Any) -> None:
            """Nothing on stderr."""

    return Handler
