"""What a service remembers of the last while, and the question for it (`shared.recorder`)."""

from typing import Any

import msgspec

from shared.messages.base import Message
from shared.messages.values import Count, Id, Number, SignedSeconds, Text, UnixSeconds


class TellRecorded(Message, frozen=True, kw_only=True):
    """Which of an instance's events are wanted: those after a number, of one request, of certain kinds."""

    since_seq: Number | None = None
    """Only what came after the event of this number; None: the latest, as many as are told."""
    request_id: Text = ""
    """Only what happened to this request; and of steps and plans how it was part of them. Empty: all."""
    kinds: tuple[Text, ...] = ()
    """Empty: all."""
    most: Count = 4096
    """No more than these."""


class RecordedEvent(Message, frozen=True, kw_only=True):
    seq: Number
    at_s: SignedSeconds
    """On the monotonic clock of the machine that recorded it."""
    kind: Text
    request_id: Text = ""
    """Empty: it concerns none, or many, which `fields` name."""
    fields: dict[Text, Any] = msgspec.field(default_factory=dict)


class Recorded(Message, frozen=True, kw_only=True):
    """The events, oldest first. They fit one message; `next_seq` says where to go on."""

    instance: Id
    service: Id
    incarnation: Number
    now_s: SignedSeconds
    """This moment on the clock of `at_s`, and by the wall clock: so events of several machines compare."""
    unix_s: UnixSeconds
    oldest_seq: Number
    """What came before is forgotten."""
    next_seq: Number
    """To be asked for with `since_seq` for what comes after these."""
    events: tuple[RecordedEvent, ...] = ()
