"""Version of the code, and of its messages. `PROTOCOL` increases by one in each release that changes a
message. Releases one apart work together, because fields are only added, with defaults. A running stack can
therefore be upgraded (`services roll`). A larger distance is logged."""

import logging

VERSION = "0.1.0"
PROTOCOL = 1
"""0: older than these numbers."""
_MOST = 4096
_log = logging.getLogger("kvasir.release")


def works_with(protocol: int) -> bool:
    """Return True if that release can run beside this one."""
    return abs(PROTOCOL - protocol) <= 1


class ReleaseWatch:
    """Warns once about each instance whose release is too far from this one."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def note(self, instance: str, protocol: int) -> bool:
        """Record an instance's release. Return True if it is newly found to be too far."""
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
