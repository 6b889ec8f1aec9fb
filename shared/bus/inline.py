"""Messages handled where they are read, without nats-py's queue and task for each subscription.

For handlers that wait for nothing: one wake-up less for every message, and the order among the messages of
all such subscriptions is kept. Private names of nats-py, as in `serving`.
"""

from collections.abc import Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription


def handle_inline(subscription: Subscription, handle: Callable[[Msg], None]) -> None:
    """Let `handle` take each message of a fresh subscription; it must not raise."""

    def take(msg: Msg) -> None:
        subscription._pending_size -= len(msg.data)
        handle(msg)

    subscription._pending_queue.put_nowait = take  # type: ignore[assignment, method-assign]
