"""Access to sequences: their gateway, schedulers and heirs may read, end, extend and forget them. Pure.

A sequence belongs to the gateway that submitted it. nats-server checks senders: each subject accepts only its
own publisher (`shared.subjects`). An heir proves itself by a key that only the gateway can have shared.
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
    """Whether the sender may act on sequences of that gateway."""
    return sender == gateway_id or is_scheduler(sender)


def is_heir(heir_key: bytes, heir_digest: bytes) -> bool:
    """Whether the key belongs to the sequence's heirs."""
    return bool(heir_digest) and compare_digest(heir_digest_of(heir_key), heir_digest)


def check_owner(sender: str, ref: SequenceRef, gateway_id: str) -> None:
    """Raise ForeignSequence unless the sender may act on sequences of that gateway."""
    if not is_for(sender, gateway_id):
        raise foreign(sender, ref)


def foreign(sender: str, ref: SequenceRef) -> ForeignSequence:
    return ForeignSequence(
        f"{ref} was not submitted by {sender!r}: only the gateway that submitted it may ask for it, end it or"
        " add to it; submit it there under a name of its own"
    )
