"""Shards of the fleet, each led by one scheduler at a time. A worker always belongs to the same one. Pure."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

MOST_SHARDS = 64


@lru_cache(maxsize=65_536)
def shard_of(worker_id: str, shards: int) -> int:
    """Return the worker's shard, by rendezvous hashing. One more shard takes workers from the others and
    moves none between them. Source: Thaler and Ravishankar 1998."""

    def weight(shard: int) -> bytes:
        return blake2b(f"{worker_id}/{shard}".encode(), digest_size=8).digest()

    return max(range(shards), key=weight)


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of `count`."""

    number: int = 0
    count: int = 1

    def has(self, worker_id: str) -> bool:
        return self.count == 1 or shard_of(worker_id, self.count) == self.number

    @property
    def role(self) -> str:
        """Return the role whose lease its leader holds."""
        return f"scheduler.{self.number}" if self.number else "scheduler"


WHOLE = Shard()
"""The only shard of an undivided fleet."""
