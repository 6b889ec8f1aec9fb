"""One request, as all services remember it: the answer of `/ui/requests/{id}`."""

from collections.abc import Sequence
from typing import Any

from services.gateway.ui.colleagues import by_wall_clock
from shared.messages.recordings import Recorded


def explained(request_id: str, told: Sequence[Recorded]) -> dict[str, Any]:
    """Its events in the order of the wall clock, and who said them."""
    events = [
        {"unix_s": event.at_s, "instance": each.instance, "kind": event.kind, **event.fields}
        for each in told
        for event in by_wall_clock(each)
    ]
    events.sort(key=lambda event: event["unix_s"])
    return {"request": request_id, "events": events}
