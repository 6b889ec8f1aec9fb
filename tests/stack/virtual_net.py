"""Processes that send each other messages on virtual time; deterministic for a seed.

A message takes a random time, keeps its order per pair of sender and receiver, and may be lost. Processes can
be killed, frozen and restarted. Knows nothing of what the messages say.
"""

import heapq
import random
from abc import ABC, abstractmethod
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


class VirtualNet(ABC):
    """Time, mail and processes. `is_over` ends `run` early."""

    def __init__(self, seed: int, loss: float) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._last_arrival: dict[tuple[str, str], float] = {}

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Nothing more is to be seen."""

    # --- time

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    def run(self, until_s: float) -> None:
        while self._events and self.now_s < until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            if self.is_over:
                return

    def _every(self, interval_s: float, action: Callable[[], None], owner: Process | None = None) -> None:
        life = owner.life if owner else 0

        def again() -> None:
            if owner is not None and (not owner.alive or owner.life != life):
                return
            if owner is None or not owner.frozen:
                action()
            self.at(self.now_s + interval_s, again)

        self.at(self.now_s + interval_s * self.random.random(), again)

    # --- messages

    def send(self, sender: str, receiver: Process, handle: Callable[[], None], *, lossy: bool = True) -> None:
        """Deliver after a while, in order, unless lost or the receiver is another one by then."""
        if lossy and self.random.random() < self.loss:
            return
        life = receiver.life
        delay_s = self.random.choice((0.0005, 0.001, 0.003, 0.02))
        time_s = max(self._last_arrival.get((sender, receiver.name), 0.0), self.now_s + delay_s)
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

    def kill(self, process: Process, back_after_s: float) -> None:
        process.alive, process.frozen, process.busy = False, False, False
        process.life += 1
        process.mail.clear()
        self.at(self.now_s + back_after_s, lambda: self._revive(process))

    @abstractmethod
    def _revive(self, process: Process) -> None:
        """It is started again."""

    def freeze(self, process: Process, for_s: float) -> None:
        process.frozen, life = True, process.life

        def wake() -> None:
            if process.life == life:
                process.frozen = False
                self._read_mail(process)

        self.at(self.now_s + for_s, wake)

    def _read_mail(self, process: Process) -> None:
        waiting, process.mail = process.mail, []
        for number, handle in enumerate(waiting):
            if process.frozen or process.busy:
                process.mail = waiting[number:] + process.mail
                return
            handle()
