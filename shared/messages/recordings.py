"""Recorded events of a service, and the query for them (`shared.recorder`)."""

from typing import Any

import msgspec

from shared.messages.base import Message
from shared.messages.values import Count, Id, Number, SignedSeconds, Text, UnixSeconds


class TellRecorded(Message, frozen=True, kw_only=True):
    """Select events of an instance by number, request and kind."""

    since_seq: Number | None = None
    """Return only events after this number; None: the latest ones."""
    request_id: Text = ""
    """Return only events of this request, and its share in steps and plans; empty: all."""
    kinds: tuple[Text, ...] = ()
    """Kinds to return; empty: all."""
    is_brief: bool = False
    """Return steps and plans without the requests in them."""
    most: Count = 4096
    """Maximum number of events."""


class RecordedEvent(Message, frozen=True, kw_only=True):
    seq: Number
    at_s: SignedSeconds
    """Time on the monotonic clock of the recording machine."""
    kind: Text
    request_id: Text = ""
    """Request of the event; empty: none, or several that `fields` lists."""
    fields: dict[Text, Any] = msgspec.field(default_factory=dict)


class Recorded(Message, frozen=True, kw_only=True):
    """Recorded events, oldest first, as many as fit one message. Continue from `next_seq`."""

    instance: Id
    service: Id
    incarnation: Number
    now_s: SignedSeconds
    """Current time on the clock of `at_s`. With `unix_s` it aligns events of different machines."""
    unix_s: UnixSeconds
    oldest_seq: Number
    """Number of the oldest event still kept."""
    next_seq: Number
    """Value of `since_seq` for the next query."""
    events: tuple[RecordedEvent, ...] = ()
