"""Seed: a process that has imported the services' modules, and forks a service on request.

Imports take most of a service's start. Here they run once for all services and restarts, and memory is
shared. The fork becomes the supervisor's own child: the supervisor is a subreaper, and the intermediate
process exits at once.

Protocol, on a Unix socket in the run directory: a line with a JSON object of `name`, `module`, `argv`, `env`
and `log`. The reply is a line with the new pid.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from services.stack.process import die_with_parent, name_process
from shared import metrics

_REQUEST_DEADLINE_S = 5.0
_MAX_REQUEST_BYTES = 1 << 20


def main() -> None:
    """Import, listen and fork until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("modules", nargs="+", help="imported before the first fork")
    arguments = parser.parse_args()
    supervisor = os.getppid()
    for module in arguments.modules:
        importlib.import_module(module)
    serve(arguments.socket, supervisor)


def serve(path: Path, supervisor: int) -> None:
    """Listen at `path`, and fork children of `supervisor` until killed."""
    gc.collect()
    gc.freeze()  # garbage collection in children leaves shared pages alone
    with socket.socket(socket.AF_UNIX) as listening:
        unnamed = path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        listening.bind(str(unnamed))
        unnamed.chmod(0o600)
        listening.listen()
        unnamed.rename(path)  # a client that finds the socket gets a reply, unless the seed died
        while True:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError, ValueError, KeyError):
                connection.settimeout(_REQUEST_DEADLINE_S)
                with connection.makefile("rb") as lines:
                    request = json.loads(lines.readline(_MAX_REQUEST_BYTES))
                pid = _fork_for(supervisor, request, (listening, connection))
                connection.sendall(f"{pid}\n".encode())


def _fork_for(supervisor: int, request: dict[str, Any], sockets: tuple[socket.socket, ...]) -> int:
    """Return the pid of a new child of `supervisor`, once the intermediate process has ended."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os.close(reading)
            os.close(writing)
            for one in sockets:
                one.close()
            _become(supervisor, request)
        os.write(writing, f"{grandchild}\n".encode())
        os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            return int(pipe.readline())
    finally:
        os.waitpid(between, 0)


def _become(supervisor: int, request: dict[str, Any]) -> None:
    """Turn this fork into the requested service; never return."""
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        _await_parent(supervisor)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv[1:] = request["argv"]
        random.seed()
        metrics.keep_own(request["module"].rpartition(".")[2])
        name_process(request["name"], ("python", "-m", request["module"], *request["argv"]))
        code = _run(request["module"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _await_parent(supervisor: int) -> None:
    """Wait until this process is the supervisor's child, then tie its life to it."""
    between = os.getppid()
    while between not in (supervisor, 1) and os.getppid() == between:
        os.sched_yield()
    die_with_parent(supervisor)()


def _run(module: str) -> int:
    """Run a module like `python -m`; return its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == "__main__":
    main()
