"""Running a service's main coroutine: event loop, signals, exit code."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from shared import log
from shared.config import ServiceConfig, load
from shared.errors import ConfigError, KvasirError

_log = logging.getLogger("kvasir.runtime")
_STOP_DEADLINE_S = 10.0

C = TypeVar("C", bound=ServiceConfig)
Main = Callable[[], Coroutine[Any, Any, None]]


def run_main(service: str, config_type: type[C], run: Callable[[C], Coroutine[Any, Any, None]]) -> None:
    """All of a `__main__`: read the configuration, set up logging, run until a signal. Ends in SystemExit."""
    try:
        config = load(config_type, section=service)
    except ConfigError as error:
        raise SystemExit(f"{service}: {error}") from None
    log.configure(config.log_level, service, config.instance, config.log_format)
    run_service(lambda: run(config))


def run_service(main: Main) -> None:
    """Run `main()` on uvloop. SIGTERM or SIGINT cancels it once, and that is a clean end (exit code 0).

    A `KvasirError` that ends it is logged in one line, anything else with its traceback; both are exit code
    1, a ConfigError is 2. What has not stopped 10 s after the signal is given up (exit code 1).
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_supervise(main))
    if code:
        raise SystemExit(code)


async def _supervise(main: Main) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main())
    stopped = asyncio.Event()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    signalled = loop.create_task(stopped.wait())
    await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set():
        await asyncio.wait({task}, timeout=_STOP_DEADLINE_S)
    signalled.cancel()
    return _exit_code(task, was_signalled=stopped.is_set())


def _exit_code(task: asyncio.Task[None], *, was_signalled: bool) -> int:
    if not task.done():
        _log.error("did not stop within %g s of the signal", _STOP_DEADLINE_S)
        return 1
    if task.cancelled():
        return 0 if was_signalled else 1
    error = task.exception()
    if error is None:
        return 0
    if isinstance(error, KvasirError):
        _log.error("%s: %s", error.code, error)
        return 2 if isinstance(error, ConfigError) else 1
    _log.error("ended by an error", exc_info=error)
    return 1
