"""An asyncio event loop on virtual time. Its callbacks run in the order in which asyncio's would run them."""

import asyncio
import contextvars
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.world import Process, Strand

_numbers = count(1)


class _Numbered:
    """Sets of tasks and futures are walked through in an order that does not depend on where they lie."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class VirtualFuture(_Numbered, asyncio.Future[Any]):
    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = next(_numbers)
        super().__init__(loop=loop)


class VirtualTask(_Numbered, asyncio.Task[Any]):
    def __init__(self, coro: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(coro, **options)


class VirtualLoop(asyncio.AbstractEventLoop):
    """Of one process."""

    strand: "Strand"

    def __init__(self, process: "Process") -> None:
        self._process, self._world = process, process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._is_idle = True
        self._main: asyncio.Task[Any] | None = None

    # --- what drives it

    def begin(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        def start() -> None:
            self._main = self.create_task(main())
            self._main.add_done_callback(self._over)

        self.call_soon(start)

    def cancel_main(self) -> None:
        if self._main is not None:
            self._main.cancel()

    def call_from_outside(self, callback: Callable[..., object], *args: Any) -> None:
        """By the world, which is no thread of any process."""
        if self._process.alive:
            self._add(asyncio.Handle(callback, args, self, contextvars.Context()))

    def turn_for_ever(self) -> None:
        """Its thread."""
        while True:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._ready:
                self._pause()
            else:
                self._is_idle = True
                self.strand.wait()
                self._is_idle = False

    def set_running(self, is_running: bool) -> None:
        _set_running_loop(self if is_running else None)

    def _pause(self) -> None:
        """A turn takes time."""
        self.strand.wait(self._world.turn_s() * self._process.slowness)

    def _over(self, main: "asyncio.Task[Any]") -> None:
        error = None if main.cancelled() else main.exception()
        how = ("cancelled" if main.cancelled() else "returned") if error is None else error
        self._process.end(how)

    def _add(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)
        if self._is_idle:
            self._is_idle = False
            self.strand.wake(self._world.turn_s() * self._process.slowness)

    # --- asyncio's side

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self._process.alive:
            self._add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._call_at(self._world.now_s + delay, callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._call_at(when - self._process.clock_ahead_s, callback, args, context)

    def _call_at(
        self, true_s: float, callback: Callable[..., object], args: Any, context: Any
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(true_s + self._process.clock_ahead_s, callback, args, self, context)

        def fire() -> None:
            if not handle._cancelled and self._process.alive:
                self._add(handle)

        self._world.at(true_s, fire)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def time(self) -> float:
        return self._process.monotonic_s()

    def create_future(self) -> VirtualFuture:
        return VirtualFuture(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> VirtualTask:
        return VirtualTask(coro, loop=self, name=name or "task", context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """On a thread of its own, whatever the executor."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                self.call_soon_threadsafe(settle, None, error)
            else:
                self.call_soon_threadsafe(settle, result, None)

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._process.strand("worker", run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._process.alive:
            self._world.on_unhandled(self._process, context)

    default_exception_handler = call_exception_handler

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._process.alive

    def is_closed(self) -> bool:
        return not self._process.alive
