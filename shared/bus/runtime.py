"""Run a service's main coroutine: event loop, signals, exit code."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import uvloop

from shared import log, metrics, spans, watchdog
from shared.config import ServiceConfig, load
from shared.errors import ConfigError, KvasirError, PermissionRefused

_log = logging.getLogger("kvasir.runtime")
_STOP_DEADLINE_S, _TRIM_S = 10.0, 30.0
_M_ARENA_MAX = -8
"""Of glibc's `mallopt`."""
_FULL_COLLECTIONS = 100
"""Collections of the second generation per full one (Python: 10); one stops a busy gateway for 0.2 s."""

C = TypeVar("C", bound=ServiceConfig)
Main = Callable[[], Coroutine[Any, Any, None]]


def run_main(service: str, config_type: type[C], run: Callable[[C], Coroutine[Any, Any, None]]) -> None:
    """Entry point of a service: load configuration, set up logging, run until a signal. Raise SystemExit."""
    try:
        config = load(config_type, section=service)
        config.check()
        spans.check(config.traces)
    except ConfigError as error:
        print(f"error: {service}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    log.configure(config.log_level, service, config.instance, config.log_format)
    share_heap()
    gc.set_threshold(*gc.get_threshold()[:2], _FULL_COLLECTIONS)
    with spans.exported(config.traces, service, config.instance):
        watchdog.start(config.instance)
        run_service(lambda: run(config))


def run_service(main: Main) -> None:
    """Run `main()` on uvloop until it ends. SIGTERM or SIGINT cancels it, with exit code 0.

    A `KvasirError` is logged in one line, other exceptions with a traceback. Both exit with 1, but
    ConfigError and PermissionRefused with 2. The process is killed (exit code 1) if it is still alive 10 s
    after the signal or after the end of `main`. It does not wait for threads of `OwnThread`.
    """
    deadline = threading.Timer(_STOP_DEADLINE_S, _give_up)
    deadline.daemon = True
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_supervise(main, deadline))
    deadline.cancel()
    if OwnThread.is_running():  # native code in a thread may not survive the interpreter's end
        logging.shutdown()
        os._exit(code)
    if code:
        raise SystemExit(code)


class OwnThread(Executor):
    """Runs each call on a new thread. The process ends without waiting for a call that was cancelled."""

    _NAME = "own"

    @classmethod
    def is_running(cls) -> bool:
        return any(thread.name == cls._NAME for thread in threading.enumerate())

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **named))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=self._NAME, daemon=True).start()
        return future


@contextmanager
def fenced(what: str) -> Iterator[None]:
    """Run one iteration of a service loop: log and count exceptions, so that the loop continues. A
    `KvasirError` is logged in one line, other exceptions with a traceback."""
    try:
        yield
    except KvasirError as error:
        _log.warning("%s: %s", what, error)
    except Exception:
        _log.exception("%s failed; the next turn comes", what)
        metrics.counter(
            "kvasir_failed_turns_total", "Turns of a service's loops that raised", ("loop",)
        ).labels(what).inc()


async def _supervise(main: Main, deadline: threading.Timer) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main())
    beside = [loop.create_task(each) for each in (watchdog.beat(), _trim())]

    def stop() -> None:
        if not deadline.is_alive():
            deadline.start()
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await asyncio.wait({task})
    for each in beside:
        each.cancel()
    was_signalled = deadline.is_alive()
    if not was_signalled:
        deadline.start()
    return _exit_code(task, was_signalled=was_signalled)


async def _trim() -> None:
    while True:
        await asyncio.sleep(_TRIM_S)
        await asyncio.to_thread(trim_heap)


def share_heap() -> None:
    """Let later threads share the main thread's heap: `trim_heap` gives back the end of no other."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Give freed memory back to the system: glibc by itself only does so at a heap's end."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _give_up() -> None:
    _log.error("did not end within %g s of being told to", _STOP_DEADLINE_S)
    logging.shutdown()
    os._exit(1)


def _exit_code(task: asyncio.Task[None], *, was_signalled: bool) -> int:
    if task.cancelled():
        return 0 if was_signalled else 1
    error = task.exception()
    if error is None:
        return 0
    if isinstance(error, KvasirError):
        _log.error("%s: %s", error.code, error)
        return 2 if isinstance(error, ConfigError | PermissionRefused) else 1
    _log.error("ended by an error", exc_info=error)
    return 1
