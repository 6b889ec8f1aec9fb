"""The process in which grammars are compiled and followed before anything else sees them.

    python -m services.gateway.forms.checker FOLDER DESCRIPTOR...

It loads the tokenizer in FOLDER once and forks a child for each socket. A child that crashes, or is ended by
a limit on its memory or processor time, is replaced by the next fork within milliseconds. The process ends
when its sockets close. Why: docs/decisions/0063.

A question is a length (4 bytes, big-endian) and a grammar in UTF-8. The reply is a length and one of `GOOD`
with the grammar as it is to be followed, `REFUSED` with the reason, and `DIED` with what ended the child.
Each socket begins with a reply: it is ready.
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
"""Processor time of one grammar. What has fewer symbols than the library's limit takes some 20 ms."""
_MOST_EXTRA_BYTES = 512 * 1024 * 1024
"""Address space of a child beyond what it has at its start."""
_MOST_REASON_CHARS = 4000
_NICENESS = 5
"""The event loop of the gateway goes first."""


def main(folder: str, descriptors: list[int]) -> None:
    """Runs until every socket is closed."""
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a client that repeats itself would fill the log
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
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)  # SIGPROF ends a process, in native code, too
        try:
            grammar = translated(question.decode())
            grammars.check(grammar)
            reply = GOOD + grammar.encode()
        except InvalidRequest as error:
            reply = REFUSED + error.message[:_MOST_REASON_CHARS].encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(served, reply)


def translated(grammar: str) -> str:
    """With what a client wrote in the library's own syntax. Raises InvalidRequest."""
    if WRITTEN not in grammar:
        return grammar
    whole = json.loads(grammar)
    for each in whole["grammars"]:
        if WRITTEN in each:
            try:
                each["lark_grammar"] = any_to_lark(each.pop(WRITTEN))
            except Exception as error:  # of a translator that raises whatever it trips over
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
