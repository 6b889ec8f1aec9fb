"""Process that compiles and tests grammars before any other part uses them (docs/decisions/0063).

    python -m services.gateway.forms.checker FOLDER DESCRIPTOR...

It forks a child per socket. One that crashes or exceeds its memory or CPU limit is replaced at once. A
request is a length (4 bytes, big-endian) and a grammar in UTF-8; the reply is a length and `GOOD` with the
grammar to use, `REFUSED` with the reason, or `DIED` with the cause. The first reply reports readiness.
"""

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from llguidance.gbnf_to_lark import any_to_lark

from shared.errors import InvalidRequest
from shared.grammars import WRITTEN, Grammars
from shared.tokenizer_files import load_tokenizer

GOOD, REFUSED, DIED = b"+", b"-", b"!"
MOST_CPU_S = 0.2
"""CPU seconds per grammar. One within the library's size limit takes about 0.02 s."""
_MOST_EXTRA_BYTES = 512 * 1024 * 1024
_MOST_REASON_CHARS = 4000
_NICENESS = 5
"""The gateway's event loop goes first."""


def main(folder: str, descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    grammars = Grammars(load_tokenizer(folder))
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for each in sockets:
        _send(each, GOOD)
    children = {_fork(grammars, each, sockets): each for each in sockets}
    while children:
        child, status = os.wait()
        served = children.pop(child)
        if status == 0:
            continue  # the gateway has closed the socket
        try:
            _send(served, DIED + _ended_by(status).encode())
        except OSError:
            continue
        children[_fork(grammars, served, sockets)] = served


def _fork(grammars: Grammars, served: socket.socket, sockets: list[socket.socket]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        for each in sockets:
            if each is not served:
                each.close()
        _limit_memory()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # repeated requests would fill the log
        _serve(grammars, served)
        os._exit(0)
    except OSError:
        os._exit(0)
    finally:
        os._exit(1)


def _serve(grammars: Grammars, served: socket.socket) -> None:
    while (length := _receive(served, 4)) is not None:
        question = _receive(served, int.from_bytes(length))
        if question is None:
            return
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)  # SIGPROF ends the process even in native code
        try:
            grammar = translated(question.decode())
            grammars.check(grammar)
            reply = GOOD + grammar.encode()
        except InvalidRequest as error:
            reply = REFUSED + error.message[:_MOST_REASON_CHARS].encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(served, reply)


def translated(grammar: str) -> str:
    """Translate a client's grammar to the library's syntax. Raises InvalidRequest."""
    if WRITTEN not in grammar:
        return grammar
    whole = json.loads(grammar)
    for each in whole["grammars"]:
        if WRITTEN in each:
            try:
                each["lark_grammar"] = any_to_lark(each.pop(WRITTEN))
            except Exception as error:  # the translator raises many types
                raise InvalidRequest(str(error)) from None
    return json.dumps(whole, ensure_ascii=False)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.exists():
        size_bytes = int(pages.read_text().split()[0]) * resource.getpagesize() + _MOST_EXTRA_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))


def _ended_by(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    return signal.Signals(os.WTERMSIG(status)).name


def _receive(served: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = served.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _send(served: socket.socket, reply: bytes) -> None:
    served.sendall(len(reply).to_bytes(4) + reply)


if __name__ == "__main__":
    main(sys.argv[1], [int(each) for each in sys.argv[2:]])
