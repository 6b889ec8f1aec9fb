"""What a step has to say, sent from the engine's thread itself where that is possible.

Through the express connection there is no event loop in the way: no wake-up, and nobody who holds the
interpreter while waiting for a busy core. Without one (an encrypted bus, a connection just lost) messages go
through the loop and `outbox`. Knows no message but by its subject.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from services.worker.outbox import Outbox, count, log_ends
from services.worker.steps import Effects
from shared.bus import Express

OnLoop = Callable[[Callable[[], None]], None]
"""Has the event loop call something soon."""


class Courier:
    """`deliver` and `attend` belong to the engine's thread, `offer` and `wants_express` to the loop's.

    `close` comes when the engine's thread has ended.
    """

    def __init__(self, outbox: Outbox, on_loop: OnLoop) -> None:
        self._outbox = outbox
        self._on_loop = on_loop
        self._express: Express | None = None
        self._offered: deque[Express] = deque()

    @property
    def wants_express(self) -> bool:
        return not self._offered and (self._express is None or not self._express.is_up)

    def offer(self, express: Express) -> None:
        """Use this one from now on, in place of any other."""
        self._offered.append(express)

    def deliver(self, effects: Effects) -> None:
        """Send frames and reports, in their order."""
        messages = self._outbox.addressed(effects)
        self._take_up()
        if self._express is None or not self._express.publish(messages):
            self._on_loop(lambda: self._outbox.put(messages))
        for stepped in effects.stepped:
            count(stepped)
            if stepped.ended:
                self._on_loop(partial(log_ends, stepped))

    def attend(self) -> None:
        """A few times a second, also when there is nothing to deliver."""
        self._take_up()
        if self._express is not None:
            self._express.attend()

    def close(self) -> None:
        for express in (self._express, *self._offered):
            if express is not None:
                express.close()

    def _take_up(self) -> None:
        """Only when nothing waits in the loop that a new connection would overtake."""
        while self._offered and self._outbox.is_empty:
            if self._express is not None:
                self._express.close()
            self._express = self._offered.popleft()
