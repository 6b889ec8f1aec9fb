"""Processes that send each other messages on virtual time; deterministic for a seed.

A message takes a random time, keeps its order per pair of sender and receiver, and may be lost. Processes can
be killed, frozen and restarted. Knows nothing of what the messages say.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from shared.errors import DeadlineExceeded, KvasirError, NoResponder

DEADLINE_S = 1.0
"""Of a request."""


@dataclass
class Process:
    """Alive or not; while it is frozen, or its engine computes a step, its mail waits."""

    name: str
    alive: bool = True
    frozen: bool = False
    busy: bool = False
    life: int = 0
    """Mail of an earlier life is not delivered."""
    mail: list[Callable[[], None]] = field(default_factory=list)


class VirtualNet:
    """Time, mail and processes. Events of one instant happen in the order in which they were announced."""

    def __init__(self, seed: int = 0, loss: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._last_arrival: dict[tuple[str, str], float] = {}

    # --- time

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now_s + delay_s, action)

    def every(
        self,
        interval_s: float,
        action: Callable[[], object],
        owner: Process | None = None,
        *,
        first_s: float | None = None,
    ) -> None:
        """While `owner` lives and is not frozen; from a random moment of the first interval on."""
        life = owner.life if owner else 0

        def again() -> None:
            if owner is not None and (not owner.alive or owner.life != life):
                return
            if owner is None or not owner.frozen:
                action()
            self.after(interval_s, again)

        self.after(interval_s * self.random.random() if first_s is None else first_s, again)

    def run(self, until_s: float) -> None:
        """Until `is_over`, and not longer than until that time."""
        self.run_until(lambda: self.is_over, limit_s=until_s - self.now_s)

    def run_until(self, done: Callable[[], bool], *, limit_s: float) -> bool:
        """Whether `done` came true within `limit_s`."""
        end_s = self.now_s + limit_s
        while not done():
            if not self._events or self._events[0][0] > end_s:
                return False
            self._next()
        return True

    def run_for(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while self._events[0][0] <= end_s:
            self._next()
        self.now_s = end_s

    def _next(self) -> None:
        when_s, _, action = heapq.heappop(self._events)
        self.now_s = max(self.now_s, when_s)
        action()

    @property
    def is_over(self) -> bool:
        """Nothing more is to be seen."""
        return False

    # --- messages

    def delay_s(self) -> float:
        """Of one message."""
        return self.random.choice((0.0005, 0.001, 0.003, 0.02))

    def send(self, sender: str, receiver: Process, handle: Callable[[], None], *, lossy: bool = True) -> None:
        """Deliver after a while, in order, unless lost or the receiver is another one by then."""
        if lossy and self.random.random() < self.loss:
            return
        life = receiver.life
        time_s = max(self._last_arrival.get((sender, receiver.name), 0.0), self.now_s + self.delay_s())
        self._last_arrival[(sender, receiver.name)] = time_s

        def deliver() -> None:
            if not receiver.alive or receiver.life != life:
                return
            if receiver.frozen or receiver.busy:
                receiver.mail.append(handle)
            else:
                handle()

        self.at(time_s, deliver)

    def ask(
        self,
        sender: Process,
        receiver: Process,
        question: Callable[[], Any],
        on_answer: Callable[[Any], None],
        on_error: Callable[[KvasirError], None],
    ) -> None:
        """A request: its answer, its error, or a deadline; exactly one of them, if the sender lives to see
        it."""
        life, open_ = sender.life, [True]

        def once(handle: Callable[[Any], None], value: Any) -> None:
            if open_[0] and sender.alive and sender.life == life:
                open_[0] = False
                handle(value)

        def serve() -> None:
            try:
                answer = question()
            except KvasirError as error:
                failure = error
                self.send(receiver.name, sender, lambda: once(on_error, failure))
                return
            self.send(receiver.name, sender, lambda: once(on_answer, answer))

        if not receiver.alive:
            self.at(self.now_s + 0.001, lambda: once(on_error, NoResponder("dead")))
            return
        self.send(sender.name, receiver, serve)
        self.at(self.now_s + DEADLINE_S, lambda: once(on_error, DeadlineExceeded("late")))

    # --- processes

    def kill(self, process: Process, back_after_s: float | None = None) -> None:
        """None: it stays dead, unless it is started."""
        process.alive, process.frozen, process.busy = False, False, False
        process.life += 1
        process.mail.clear()
        if back_after_s is not None:
            self.after(back_after_s, lambda: self.revive(process))

    def revive(self, process: Process) -> None:
        """It is started again."""

    def freeze(self, process: Process, for_s: float = math.inf) -> None:
        process.frozen, life = True, process.life

        def wake() -> None:
            if process.life == life:
                self.wake(process)

        self.after(for_s, wake)

    def wake(self, process: Process) -> None:
        process.frozen = False
        self.read_mail(process)

    def read_mail(self, process: Process) -> None:
        waiting, process.mail = process.mail, []
        for number, handle in enumerate(waiting):
            if process.frozen or process.busy:
                process.mail = waiting[number:] + process.mail
                return
            handle()
