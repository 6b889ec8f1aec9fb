"""Workers in the order in which they should be asked to lend, kept sorted. Pure.

A question looks at a few entries and not at all workers, so that it costs the same with ten and with ten
thousand (papers/001 §4.4, Scalability).
"""

from collections.abc import Iterator

from sortedcontainers import SortedKeyList

_POSITIVE = (0, "")
"""Above every key of a worker that has something left, below all others."""


class Ranking:
    """Worker ids by what they have left to lend, most first, then by id; by host as well."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[int, str]] = {}
        self._hosts: dict[str, str] = {}
        self._all = _line()
        self._at: dict[str, SortedKeyList] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, worker_id: str, host: str, left: int) -> None:
        """Enters a worker, or moves it to its new place. `left` may be negative."""
        key = (-left, worker_id)
        if self._keys.get(worker_id) == key and self._hosts[worker_id] == host:
            return
        self.remove(worker_id)
        self._keys[worker_id], self._hosts[worker_id] = key, host
        self._all.add(key)
        if host:
            self._at.setdefault(host, _line()).add(key)

    def remove(self, worker_id: str) -> None:
        """Forgets a worker, if it is there."""
        key = self._keys.pop(worker_id, None)
        if key is None:
            return
        self._all.remove(key)
        host = self._hosts.pop(worker_id)
        if host:
            self._at[host].remove(key)
            if not self._at[host]:
                del self._at[host]

    def best(self, host: str) -> Iterator[str]:
        """Neighbours at `host` that have something left, others that have, then those without, likewise."""
        yield from self.within(host, has_left=True)
        yield from self.within(host, has_left=False)

    def within(self, host: str, *, has_left: bool) -> Iterator[str]:
        """Neighbours, then others: those of them that have something left, or that have not."""
        near = self._at.get(host) if host else None
        bounds = {"max_key": _POSITIVE, "inclusive": (True, False)} if has_left else {"min_key": _POSITIVE}
        if near is not None:
            yield from (worker for _, worker in near.irange_key(**bounds))
        for _, worker in self._all.irange_key(**bounds):
            if near is None or self._hosts[worker] != host:
                yield worker

    def check_integrity(self) -> None:
        """Raises AssertionError when the orders disagree."""
        assert list(self._all) == sorted(self._keys.values())
        for host, line in self._at.items():
            assert list(line) == sorted(key for w, key in self._keys.items() if self._hosts[w] == host)


def _line() -> SortedKeyList:
    return SortedKeyList(key=lambda key: key)
