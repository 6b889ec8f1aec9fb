"""Copies of other gateways' requests, kept for a takeover. Pure; bounded in bytes. When a gateway is gone,
its unfinished answers are taken over at once, the others when a client asks for them."""

from collections import OrderedDict
from dataclasses import dataclass

from shared.liveness import Start
from shared.messages.shadows import Shadow


def size_bytes(shadow: Shadow) -> int:
    return 1024 + len(shadow.body) + sum(map(len, shadow.prompts))


@dataclass(slots=True)
class Shadowed:
    """One copied request."""

    owner: Start
    shadow: Shadow
    told_s: float
    """Time of receipt; the shadow's times refer to it."""
    ended_s: float | None = None
    is_orphan: bool = False


class RequestShadows:
    """Shadows by request, and by the names that clients use."""

    def __init__(self, most_bytes: int, keep_s: float) -> None:
        """Ended shadows are kept for `keep_s`."""
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self._of: OrderedDict[str, Shadowed] = OrderedDict()
        self._by_name: dict[bytes, str] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._of)

    def put(self, owner: Start, shadow: Shadow, now_s: float) -> None:
        """Add or replace a shadow; evict the oldest ones above the size limit."""
        self._forget(shadow.request_id)
        for name in shadow.names:
            if (former := self._by_name.get(name)) is not None:
                self._forget(former)
            self._by_name[name] = shadow.request_id
        self._of[shadow.request_id] = Shadowed(owner, shadow, now_s)
        self.bytes += size_bytes(shadow)
        while self.bytes > self._most_bytes:
            self._forget(next(iter(self._of)))

    def end(self, owner: Start, request_id: str, now_s: float) -> None:
        """Mark the answer complete; only its owner can."""
        known = self._of.get(request_id)
        if known is not None and known.owner == owner:
            known.ended_s = now_s

    def drop(self, owner: Start, request_id: str) -> None:
        """Remove a shadow; only its owner can."""
        known = self._of.get(request_id)
        if known is not None and known.owner == owner:
            self._forget(request_id)

    def find(self, name: bytes) -> Shadowed | None:
        return self._of[self._by_name[name]] if name in self._by_name else None

    def take(self, request_id: str) -> None:
        """Remove a shadow, whoever owns it."""
        self._forget(request_id)

    def on_gone(self, owner: Start) -> list[Shadowed]:
        """Remove and return a gone owner's unfinished shadows; the finished ones become orphans."""
        left = [known for known in self._of.values() if known.owner == owner and known.ended_s is None]
        for known in left:
            self._forget(known.shadow.request_id)
        for known in self._of.values():
            known.is_orphan = known.is_orphan or known.owner == owner
        return left

    def on_tick(self, now_s: float) -> None:
        for known in list(self._of.values()):
            if known.ended_s is not None and now_s - known.ended_s > self._keep_s:
                self._forget(known.shadow.request_id)

    def check_integrity(self) -> None:
        assert self.bytes == sum(size_bytes(known.shadow) for known in self._of.values()) <= self._most_bytes
        assert {name for known in self._of.values() for name in known.shadow.names} == set(self._by_name)
        assert all(name in self._of[request].shadow.names for name, request in self._by_name.items())

    def _forget(self, request_id: str) -> None:
        known = self._of.pop(request_id, None)
        if known is None:
            return
        self.bytes -= size_bytes(known.shadow)
        for name in known.shadow.names:
            if self._by_name.get(name) == request_id:
                del self._by_name[name]
