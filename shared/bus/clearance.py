"""Permissions of this bus user, as learnt from the server's refusals.

NATS does not confirm a publication, and reports a refused one later. The first publication to a subject
therefore waits one round trip, in which a refusal would arrive. Later ones do not wait, until a refusal or a
new connection. nats-py spells refused subjects in lower case.
"""

from dataclasses import dataclass

from shared.bus.link import Link
from shared.errors import PermissionRefused

_VERDICT_S = 1.0
"""Timeout for a frozen server; the publication then counts as sent."""

_MAX_CLEARED = 4096


@dataclass(eq=False)
class _Trial:
    subject: str
    refused: bool = False


class Clearance:
    """Learns permissions by publishing and subscribing."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._cleared: set[str] = set()
        self._trials: list[_Trial] = []
        self._subscriptions: set[str] = set()

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish, after a check if needed. Raise PermissionRefused, or the errors of `Link.send`."""
        if subject in self._cleared:
            await self._link.send(subject, data)
            return
        trial = _Trial(subject)
        self._trials.append(trial)
        try:
            await self._link.send(subject, data)
            settled = self._link.connected and await self._link.settle(_VERDICT_S)
        finally:
            self._trials.remove(trial)
        if trial.refused:
            raise publish_refused(subject)
        if settled:
            if len(self._cleared) >= _MAX_CLEARED:
                self._cleared.clear()
            self._cleared.add(subject)

    def begin_subscribing(self, subjects: set[str]) -> None:
        """Forget earlier refusals of these subjects."""
        self._subscriptions -= {subject.lower() for subject in subjects}

    def check_subscribed(self, subjects: set[str]) -> None:
        """Raise PermissionRefused if one of these was refused. Call it after a round trip."""
        refused = sorted(subject for subject in subjects if subject.lower() in self._subscriptions)
        if refused:
            raise PermissionRefused(
                f"the bus user may not subscribe to {', '.join(refused)}: allow it in NATS"
            )

    def on_refused(self, verb: str, subject: str) -> None:
        """Record a refusal; `verb` is "publish" or "subscription"."""
        if verb != "publish":
            self._subscriptions.add(subject)
            return
        self._cleared = {cleared for cleared in self._cleared if cleared.lower() != subject}
        for trial in self._trials:
            trial.refused |= trial.subject.lower() == subject

    def forget(self) -> None:
        """Start over on a new connection, whose permissions may differ."""
        self._cleared.clear()


def publish_refused(subject: str) -> PermissionRefused:
    """Return the error for a refused publication or request."""
    return PermissionRefused(f"the bus user may not publish to {subject}: allow it in NATS")
