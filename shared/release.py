"""Which code this is: its version, and the release of its messages.

`PROTOCOL` rises by one with every release in which a message has changed. A process works together with those
of one release before it and one after it: fields are only ever added, with defaults, so that a stack can be
rolled from one to the next while it serves (`services roll`). Who is further apart is named in the log.
"""

import logging

VERSION = "0.1.0"
PROTOCOL = 1
"""0: from before there were numbers."""
_MOST = 4096
_log = logging.getLogger("kvasir.release")


def works_with(protocol: int) -> bool:
    """Whether a process of that release is supported beside this one."""
    return abs(PROTOCOL - protocol) <= 1


class ReleaseWatch:
    """Says once of each instance that its release is too far from this one."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def note(self, instance: str, protocol: int) -> bool:
        """Its heartbeat says so. True where that was news, and too far."""
        if self._told.get(instance) == protocol or works_with(protocol):
            return False
        if len(self._told) >= _MOST:
            self._told.clear()
        self._told[instance] = protocol
        _log.warning(
            "%s speaks release %d and this process %d: one apart is supported, roll the older one on",
            instance,
            protocol,
            PROTOCOL,
        )
        return True
