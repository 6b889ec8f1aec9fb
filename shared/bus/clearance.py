"""What the server lets this user publish and subscribe to, as far as it has said.

NATS answers a publication with silence and a refused one with an error some time later. So the first
publication to a subject waits for one round trip, within which a refusal arrives; later ones do not. After a
refusal, and on a new connection, the next one waits again. nats-py spells refused subjects in lower case.
"""

from dataclasses import dataclass

from shared.bus.link import Link
from shared.errors import PermissionRefused

_VERDICT_S = 1.0
"""A server that is silent for longer is frozen; the publication is not held up for it."""

_MAX_CLEARED = 4096


@dataclass(eq=False)
class _Trial:
    subject: str
    refused: bool = False


class Clearance:
    """Asks the server by doing; remembers what it did not refuse."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._cleared: set[str] = set()
        self._trials: list[_Trial] = []
        self._subscriptions: set[str] = set()

    async def publish(self, subject: str, data: bytes) -> None:
        """Raises PermissionRefused, and what `Link.send` raises."""
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
        """Forget what was said about these before."""
        self._subscriptions -= {subject.lower() for subject in subjects}

    def check_subscribed(self, subjects: set[str]) -> None:
        """After a round trip: raises PermissionRefused if one of these was refused."""
        refused = sorted(subject for subject in subjects if subject.lower() in self._subscriptions)
        if refused:
            raise PermissionRefused(
                f"the bus user may not subscribe to {', '.join(refused)}: allow it in NATS"
            )

    def on_refused(self, verb: str, subject: str) -> None:
        """The server refused to "publish" or a "subscription"."""
        if verb != "publish":
            self._subscriptions.add(subject)
            return
        self._cleared = {cleared for cleared in self._cleared if cleared.lower() != subject}
        for trial in self._trials:
            trial.refused |= trial.subject.lower() == subject

    def forget(self) -> None:
        """A new connection: the server, or its permissions, may be others."""
        self._cleared.clear()


def publish_refused(subject: str) -> PermissionRefused:
    """The error for a publication or a question."""
    return PermissionRefused(f"the bus user may not publish to {subject}: allow it in NATS")
