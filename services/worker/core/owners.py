"""Who may ask for a sequence, end it, add to it or have it forgotten: its gateway, schedulers, heirs. Pure.

A sequence belongs to the gateway that its submission names. That the sender of a command is who it says was
checked before: nats-server lets nobody else publish there (`shared.subjects`). An heir is whoever shows a key
that only its gateway can have given away.
"""

from hmac import compare_digest

from shared.errors import ForeignSequence
from shared.messages.sequence import SequenceRef, heir_digest_of
from shared.subjects import service_of


def is_scheduler(sender: str) -> bool:
    try:
        return service_of(sender) == "scheduler"
    except ValueError:
        return False


def is_for(sender: str, gateway_id: str) -> bool:
    """Whether a sequence of that gateway is the sender's affair."""
    return sender == gateway_id or is_scheduler(sender)


def is_heir(heir_key: bytes, heir_digest: bytes) -> bool:
    """Whether the key is that of the sequence's heirs."""
    return bool(heir_digest) and compare_digest(heir_digest_of(heir_key), heir_digest)


def check_owner(sender: str, ref: SequenceRef, gateway_id: str) -> None:
    """Raises ForeignSequence when a sequence of that gateway is none of the sender's affair."""
    if not is_for(sender, gateway_id):
        raise foreign(sender, ref)


def foreign(sender: str, ref: SequenceRef) -> ForeignSequence:
    return ForeignSequence(
        f"{ref} was not submitted by {sender!r}: only the gateway that submitted it may ask for it, end it or"
        " add to it; submit it there under a name of its own"
    )
