"""Time, processes and their threads, all of it virtual: one seed, one course of events.

Everything runs on one thread of the system. A virtual process has an event loop and threads; each of them is
a greenlet, which runs until it waits for something and is resumed by an event. Events happen in the order of
their times; what is due at the same time happens in an order that the seed chooses. Knows nothing of what
runs in it.
"""

import random
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from typing import Any

from greenlet import getcurrent, greenlet

from sim.events import EventQueue
from tests.simulation.loop import VirtualLoop

BEGAN_S = 1000.0
"""What monotonic clocks show first."""
UNIX_S = 1.7e9
A_MOMENT_S = 1e-9
"""Between two things that keep their order."""
_TURN_S = (2e-5, 8e-5)
"""What one turn of an event loop takes, and how late a thread runs that was woken."""


class Stuck(BaseException):
    """More happens at one moment than can be: some loop never lets time pass."""


class World:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._queue: EventQueue[Callable[[], object]] = EventQueue(BEGAN_S)
        self.strand: Strand | None = None
        """What runs; None: the world itself."""
        self.processes: list[Process] = []
        """All lives, the dead ones, too."""
        self.events = 0
        self._hub = getcurrent()
        self._digest = blake2b(digest_size=16)
        self.bus: Any = None
        """The simulated nats-servers."""
        self.on_unhandled: Callable[[Process, dict[str, Any]], object] = lambda process, context: None
        self.trace: Callable[[str], object] | None = None
        self.after_event: Callable[[], object] = lambda: None

    # --- time

    @property
    def now_s(self) -> float:
        """The true time."""
        return self._queue.now_s

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Once, then; not before now."""
        self._queue.push(max(time_s, self.now_s), self.random.random(), action)

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now_s + delay_s, action)

    def run_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Whether `done` came true within so much virtual time."""
        end_s = self.now_s + limit_s
        while not done():
            if self._queue.due_s > end_s:
                self._queue.now_s = end_s
                return False
            _, action = self._queue.pop()
            self.events += 1
            action()
            self.after_event()
        return True

    def turn_s(self) -> float:
        """See `_TURN_S`."""
        low_s, high_s = _TURN_S
        return low_s + (high_s - low_s) * self.random.random()

    # --- what happened

    def note(self, *words: object) -> None:
        """Into the log by which two runs are compared."""
        line = " ".join(map(str, words))
        self._digest.update(f"{self.now_s!r} {line}\n".encode())
        if self.trace is not None:
            self.trace(f"{self.now_s - BEGAN_S:10.6f} {line}")

    def end(self) -> None:
        """Nothing runs in it any more."""
        self._queue.clear()
        for process in self.processes:
            process.alive = False

    @property
    def digest(self) -> str:
        """Of all that was noted."""
        return self._digest.hexdigest()

    def to_hub(self) -> Any:
        """The running strand gives way; returns what it is resumed with."""
        return self._hub.switch()

    @property
    def hub(self) -> Any:
        return self._hub


class Strand:
    """One thread of a process, its event loop's included. It runs until it waits."""

    def __init__(self, process: "Process", name: str, run: Callable[[], object]) -> None:
        self.process, self.name = process, name
        self.is_over = False
        self._run, self._world = run, process.world
        self._waits = 0
        """Numbers what it waits for: it is resumed by what belongs to the present wait."""
        self._is_waiting = True
        self.hangs_until_s = 0.0
        self._greenlet = greenlet(self._main, parent=process.world.hub)
        self.on_over: list[Callable[[], object]] = []
        self._later(self._waits, self._world.turn_s(), woken=True)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Called by itself: until `wake`, or until the time is over, which is False."""
        world = self._world
        assert world.strand is self, f"{self.name} cannot be made to wait by somebody else"
        self._waits += 1
        self._is_waiting = True
        if timeout_s is not None:
            self._later(self._waits, max(0.0, timeout_s), woken=False)
        return bool(world.to_hub())

    def wake(self, delay_s: float | None = None) -> None:
        """Called by others, and by itself between two waits never."""
        if self._is_waiting:
            self._later(self._waits, self._world.turn_s() if delay_s is None else delay_s, woken=True)

    def _later(self, wait: int, delay_s: float, *, woken: bool) -> None:
        self._world.after(delay_s, lambda: self._resume(wait, woken=woken))

    def _resume(self, wait: int, *, woken: bool) -> None:
        process = self.process
        if not process.alive or self.is_over or wait != self._waits or not self._is_waiting:
            return
        until_s = max(process.frozen_until_s, self.hangs_until_s)
        if until_s > self._world.now_s:
            self._world.at(until_s, lambda: self._resume(wait, woken=woken))
            return
        self._is_waiting = False
        self._world.strand = self
        process.loop.set_running(self is process.loop.strand)
        try:
            self._greenlet.switch(woken)
        finally:
            process.loop.set_running(False)
            self._world.strand = None

    def _main(self, woken: bool) -> None:
        try:
            self._run()
        finally:
            self.is_over = True
        for tell in self.on_over:
            tell()


class Process:
    """One life of a process. `main` is what it runs, on its loop."""

    def __init__(self, world: World, name: str, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.began_s = world.now_s
        self.frozen_until_s, self.slowness = 0.0, 1.0
        """Its turns and sleeps of its threads take so many times as long."""
        self.copies_stand_until_s = 0.0
        """Copies between its memories do not go on before, as where a disk hangs or memory is swapped out."""
        self.clock_ahead_s = world.random.uniform(0.0, 1e4)
        """Of its monotonic clock, whose origin is nobody's business."""
        self.wall_ahead_s = world.random.uniform(-0.5, 0.5)
        self.ended: BaseException | str | None = None
        """How it ended by itself."""
        self.on_death: list[Callable[[], object]] = []
        self.loop = VirtualLoop(self)  # type: ignore[abstract]
        self.loop.strand = Strand(self, f"{name}/loop", self.loop.turn_for_ever)
        self.loop.begin(main)
        world.processes.append(self)

    def strand(self, name: str, run: Callable[[], object]) -> Strand:
        """Another thread of it."""
        return Strand(self, f"{self.name}/{name}", run)

    def monotonic_s(self) -> float:
        return self.world.now_s + self.clock_ahead_s

    def unix_s(self) -> float:
        return UNIX_S + self.world.now_s - BEGAN_S + self.wall_ahead_s

    def end(self, how: BaseException | str) -> None:
        """Its main coroutine is over."""
        self.ended = how
        self.kill()

    def kill(self) -> None:
        """At once; nothing of it runs again."""
        if self.alive:
            self.alive = False
            self.world.note("dead", self.name)
            for tell in self.on_death:
                tell()

    def freeze(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT later. Its clock goes on."""
        self.frozen_until_s = max(self.frozen_until_s, self.world.now_s + for_s)

    def terminate(self) -> None:
        """SIGTERM."""
        self.loop.call_from_outside(self.loop.cancel_main)
