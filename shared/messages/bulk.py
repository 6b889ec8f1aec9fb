"""How a worker gets onto another's bulk plane: an address and a ticket, asked for over the bus.

No tensor travels here. A ticket is a secret, valid once and briefly, for the worker that asked.
"""

from shared.messages.base import Message


class AskTicket(Message, frozen=True, kw_only=True):
    """Who wants to dial."""

    worker_id: str
    incarnation: int


class BulkTicket(Message, frozen=True, kw_only=True):
    """Where to dial, and with what."""

    incarnation: int
    """Of the worker that answers."""
    addresses: dict[str, str]
    """By transport."""
    host: str = ""
    """Workers of equal host may use what works on one host only."""
    ticket: bytes
