"""The door to the engine's thread: what other threads and the event loop have it do between two steps.

What goes through is a command that nobody waits for (`post`), a question (`ask`), or something that changes
hands: `give` brings it to the engine's thread, `take` fetches it from there. Blocks, say, belong to one side
or the other at every moment: whoever stops waiting for a `give` does not stop it, and what was taken for
somebody who is gone is undone on the engine's thread. Knows neither the engine nor what a command does.
"""

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
Command = Callable[[StepCore, float], StepEffects]
EngineQuestion = Callable[[StepCore, float], T]
"""Asked with the core and the time, on the engine's thread."""


class Door:
    """Of one engine's thread, which alone calls `run_waiting`; the rest is for every other thread.

    `deliver` sends the effects of posted commands, on the engine's thread.
    """

    def __init__(self, core: StepCore, clock: Clock, deliver: Callable[[StepEffects], None]) -> None:
        self.core = core
        self.clock = clock
        self._deliver = deliver
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.failed_commands = 0
        """Posted or given, or undone, and raised; since the start."""

    def wake(self) -> None:
        """Let the engine's thread look around now."""
        if self._waiting.qsize() < _MAX_WAITING:  # else it has enough to wake up for
            self._waiting.put(None)

    def post(self, command: Command) -> None:
        """Run a command between two steps and deliver its effects; one that fails is logged and counted.

        Raises Overloaded when too many wait.
        """
        self._enter(lambda: self._guarded(lambda: self.emit(command(self.core, self.clock()))))

    def ask(self, question: EngineQuestion[T]) -> "Future[T]":
        """Like `post`, for a command with an answer that may be withdrawn: only for what hands nothing over.

        Raises Overloaded when too many wait.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                self._answer(future, question)

        self._enter(run)
        return future

    def give(self, question: EngineQuestion[T]) -> "Future[T]":
        """Like `ask`, for what hands something over to the engine's thread: never refused, as what is given
        was taken before and is bounded by that, and never withdrawn, whoever stops waiting for the answer."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # From now on nobody can cancel it.

        def run() -> None:
            self._answer(future, question)
            self._guarded(future.result)  # Perhaps nobody else looks at it.

        self._waiting.put(run)
        return future

    async def take(self, question: EngineQuestion[T], undo: Callable[[T], object]) -> T:
        """Like `ask`, for an answer that is the asker's from then on.

        When the asker is cancelled before it has the answer, `undo` gets it, on the engine's thread. Raises
        Overloaded when too many wait.
        """
        future = self._offered(question, undo)
        try:
            return await asyncio.wrap_future(future)
        except BaseException:
            self._abandon(future, undo)
            raise

    def take_within(self, question: EngineQuestion[T], undo: Callable[[T], object], timeout_s: float) -> T:
        """`take`, for threads. Raises DeadlineExceeded, and Overloaded when too many wait."""
        future = self._offered(question, undo)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self._abandon(future, undo)
            raise DeadlineExceeded(f"the engine was busy for {timeout_s:g} s") from None

    def run_waiting(self, wait_s: float) -> None:
        """What has arrived; nothing yet: the first that does within that time. On the engine's thread."""
        try:
            run = self._waiting.get(timeout=wait_s) if wait_s > 0 else self._waiting.get_nowait()
            while True:
                if run is not None:
                    run()
                run = self._waiting.get_nowait()
        except Empty:
            return

    def emit(self, effects: StepEffects) -> None:
        """Send what there is to be sent. On the engine's thread."""
        if effects.frames or effects.stepped:
            self._deliver(effects)

    def _enter(self, run: Callable[[], None]) -> None:
        if self._waiting.qsize() >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} commands wait for the engine", retry_after_s=1.0)
        self._waiting.put(run)

    def _answer(self, future: "Future[T]", question: EngineQuestion[T]) -> None:
        try:
            future.set_result(question(self.core, self.clock()))
        except Exception as error:
            future.set_exception(error)

    def _offered(self, question: EngineQuestion[T], undo: Callable[[T], object]) -> "Future[T]":
        """Cancelled before it is answered: the answer is undone there and then."""
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
        """Nobody waits for it any more: what it answered, or is answering now, goes back."""
        if not future.cancel():
            future.add_done_callback(lambda done: self._waiting.put(lambda: self._undo(done, undo)))

    def _undo(self, answered: "Future[T]", undo: Callable[[T], object]) -> None:
        if answered.exception() is None:
            self._guarded(lambda: undo(answered.result()))

    def _guarded(self, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception:
            self.failed_commands += 1
            _failed.inc()
            _log.exception("a command to the engine failed")
