"""How a worker gets onto another's bulk plane: an address and a ticket, asked for over the bus.

No tensor travels here. A ticket is a secret, valid once and briefly, for the worker that asked.
"""

from shared.messages.base import Message
from shared.messages.values import Id, Number, Text


class AskTicket(Message, frozen=True, kw_only=True):
    """Who wants to dial."""

    worker_id: Id
    incarnation: Number


class BulkTicket(Message, frozen=True, kw_only=True):
    """Where to dial, and with what."""

    incarnation: Number
    """Of the worker that answers."""
    addresses: dict[Id, Text]
    """By transport."""
    host: Text = ""
    """Workers of equal host may use what works on one host only."""
    ticket: bytes
