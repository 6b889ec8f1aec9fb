"""Which borrowed blocks a debtor with free memory should bring home. Pure.

Device memory of the creditor under most pressure first: it lacks it. Then host memory, which is the slower to
read and of no other use to its owner; then by pressure, and far ones before near ones of equal pressure,
since reading them costs more. Source: `algorithms.md` §4 (repayment).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shared.messages.lending import KvTier
from shared.messages.reports import WorkerReported
from shared.ttl_map import RecentMap

_FRESH_S = 5.0
_MOST_NEIGHBOURS = 4096


@dataclass(frozen=True, slots=True)
class CreditorPressure:
    """Of a creditor, as far as its debtor knows."""

    short_blocks: int = 0
    """It wants back so many, of its device memory."""
    free_fraction: float = 1.0
    """Of its own memory."""
    distance: int = 0


def in_order(
    lenders: Iterable[tuple[str, KvTier]], pressures: Mapping[str, CreditorPressure]
) -> list[tuple[str, KvTier]]:
    """Creditors' memory, by tier: what is to be brought home first comes first."""
    nothing = CreditorPressure()

    def rank(lender: tuple[str, KvTier]) -> tuple[int, bool, float, int, str]:
        creditor, tier = lender
        pressure = pressures.get(creditor, nothing)
        is_device = tier is KvTier.DEVICE
        short_blocks = pressure.short_blocks if is_device else 0
        return -short_blocks, is_device, pressure.free_fraction, -pressure.distance, creditor

    return sorted(lenders, key=rank)


def recalls(
    borrowed: Mapping[str, int], pressures: Mapping[str, CreditorPressure], free_blocks: int, keep_blocks: int
) -> dict[str, int]:
    """Device blocks to recall by creditor, of `borrowed` (in use), into what is free beyond `keep_blocks`."""
    room = max(0, free_blocks - keep_blocks)
    found: dict[str, int] = {}
    for creditor, _ in in_order(((creditor, KvTier.DEVICE) for creditor in borrowed), pressures):
        blocks = min(borrowed[creditor], room)
        if blocks > 0:
            found[creditor] = blocks
            room -= blocks
    return found


class Pressures:
    """What a worker's neighbours say of themselves in heartbeats."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._own_host = ""
        self._heard: RecentMap[str, tuple[float, str]] = RecentMap(_FRESH_S, _MOST_NEIGHBOURS)

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Any worker's heartbeat; one of an earlier life is replaced by the next."""
        if report.worker_id == self._worker_id:
            self._own_host = report.host
        else:
            free = report.capacity.plannable_blocks / max(1, report.capacity.total_blocks)
            self._heard.put(report.worker_id, (free, report.host), now_s)

    def of(self, wanted_back: Mapping[str, int], now_s: float) -> dict[str, CreditorPressure]:
        """By creditor; `wanted_back` in blocks."""
        self._heard.expire(now_s)
        found = {
            name: CreditorPressure(free_fraction=free, distance=int(host != self._own_host))
            for name, (free, host) in self._heard.items()
        }
        for name, blocks in wanted_back.items():
            found[name] = replace(found.get(name, CreditorPressure()), short_blocks=blocks)
        return found
