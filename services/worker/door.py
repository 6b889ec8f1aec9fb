"""Queue of calls that other threads and the event loop run on the engine's thread between two steps. Steps in
flight are finished first, unless a command can do without.

`post` runs a command without an answer, `ask` returns an answer. `give` and `take` transfer ownership, for
example of blocks, to and from the engine's thread. Cancelling a `give` does not stop it. If the caller of
`take` is cancelled, the engine's thread undoes it."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from services.worker.core.steps import StepCore, StepEffects
from shared.clock import Clock
from shared.errors import DeadlineExceeded, Overloaded
from shared.metrics import counter

_log = logging.getLogger("kvasir.worker.door")
_failed = counter("kvasir_worker_failed_commands_total", "Commands to the engine that failed; see the log.")
_MAX_WAITING = 16384

T = TypeVar("T")
Command = Callable[[StepCore, float], StepEffects | None]
EngineQuestion = Callable[[StepCore, float], T]
"""Function of the core and the time in seconds, called on the engine's thread."""


class Door:
    """The queue of one engine's thread, which alone calls `run_waiting` and `emit`. Any thread may call the
    other methods. `deliver` sends the effects of commands, on the engine's thread."""

    def __init__(self, core: StepCore, clock: Clock, deliver: Callable[[StepEffects], None]) -> None:
        self.core = core
        self.clock = clock
        self._deliver = deliver
        self.settle: Callable[[], None] = lambda: None
        """Finishes the steps in flight. The engine's thread sets it."""
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.failed_commands = 0
        """Number of `post`, `give` and `undo` calls that raised since the start."""

    def wake(self) -> None:
        """Wake the engine's thread if it waits for a command."""
        if self._waiting.qsize() < _MAX_WAITING:  # a full queue wakes the thread anyway
            self._waiting.put(None)

    def post(self, command: Command, *, settles: bool = True) -> None:
        """Run a command between two steps and deliver its effects; log and count a failure. Raises Overloaded
        when the queue is full. Without `settles`, steps may be in flight."""

        def run() -> None:
            if settles:
                self.settle()
            self._guarded(lambda: self.emit(command(self.core, self.clock())))

        self._enter(run)

    def ask(self, question: EngineQuestion[T]) -> "Future[T]":
        """Return the future answer to a question that transfers no ownership; the future may be cancelled.
        Raises Overloaded when the queue is full."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                self._answer(future, question)

        self._enter(run)
        return future

    def give(self, question: EngineQuestion[T]) -> "Future[T]":
        """Like `ask`, but transfer ownership to the engine's thread: never refused and never cancelled. The
        queue needs no bound here, because everything given was taken before."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # A running future cannot be cancelled.

        def run() -> None:
            self._answer(future, question)
            self._guarded(future.result)  # Log a failure even if the caller ignores the future.

        self._waiting.put(run)
        return future

    async def take(self, question: EngineQuestion[T], undo: Callable[[T], object]) -> T:
        """Like `ask`, but the caller owns the answer. If the caller is cancelled first, `undo` is called with
        the answer on the engine's thread. Raises Overloaded when the queue is full."""
        future = self._offered(question, undo)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            self._abandon(future, undo)
            raise

    def take_within(self, question: EngineQuestion[T], undo: Callable[[T], object], timeout_s: float) -> T:
        """`take` for threads. Raises DeadlineExceeded, or Overloaded when the queue is full."""
        future = self._offered(question, undo)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self._abandon(future, undo)
            raise DeadlineExceeded(f"the engine was busy for {timeout_s:g} s") from None

    def run_waiting(self, wait_s: float) -> None:
        """Run all waiting calls. If there are none, wait up to `wait_s` seconds for the first."""
        try:
            run = self._waiting.get(timeout=wait_s) if wait_s > 0 else self._waiting.get_nowait()
            while True:
                if run is not None:
                    run()
                run = self._waiting.get_nowait()
        except Empty:
            return

    def emit(self, effects: StepEffects | None) -> None:
        """Deliver effects unless they are empty. Called on the engine's thread."""
        if effects is not None and (effects.frames or effects.stepped):
            self._deliver(effects)

    def _enter(self, run: Callable[[], None]) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} commands wait for the engine", retry_after_s=1.0)
        self._waiting.put(run)

    def _answer(self, future: "Future[T]", question: EngineQuestion[T]) -> None:
        self.settle()
        try:
            future.set_result(question(self.core, self.clock()))
        except Exception as error:
            future.set_exception(error)

    def _offered(self, question: EngineQuestion[T], undo: Callable[[T], object]) -> "Future[T]":
        """Enqueue a question; if its future is cancelled while the question runs, undo the answer at once."""
        future: Future[T] = Future()

        def run() -> None:
            if future.cancelled():
                return
            answered: Future[T] = Future()
            self._answer(answered, question)
            if not future.set_running_or_notify_cancel():
                self._undo(answered, undo)
            elif (error := answered.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(answered.result())

        self._enter(run)
        return future

    def _abandon(self, future: "Future[T]", undo: Callable[[T], object]) -> None:
        """Cancel the future, or undo its answer on the engine's thread if it is running or done."""
        if not future.cancel():
            future.add_done_callback(lambda done: self._waiting.put(lambda: self._undo(done, undo)))

    def _undo(self, answered: "Future[T]", undo: Callable[[T], object]) -> None:
        self.settle()
        if answered.exception() is None:
            self._guarded(lambda: undo(answered.result()))

    def _guarded(self, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception:
            self.failed_commands += 1
            _failed.inc()
            _log.exception("a command to the engine failed")
