"""What the prefix cache needs of those who move the bytes. A contract; knows no tensor and no file itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.kv.core.radix_tree import Tier
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a stored block to the device."""

    name: BlockHash
    tier: Tier
    """Where it is: HOST, PEER or DISK."""
    place: int
    block: int
    """Where it goes on the device."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a list of loads went: the first `done` of them hold verified bytes."""

    done: int
    elapsed_s: tuple[float, ...] = (0.0,) * len(Tier)
    """By tier, for those that were done."""
    failed: bool = False
    """The load after those was torn, corrupt or of another model; False when it was merely abandoned."""
    wasted_s: float = 0.0
    """Spent on the load after those."""


@dataclass(frozen=True, slots=True)
class Store:
    """Keep a device block in a host slot."""

    name: BlockHash
    block: int
    place: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that a disk tier holds, as its header says, or one that goes to a slot of a peer's."""

    name: BlockHash
    parent: BlockHash
    """Empty for a first block."""
    depth: int
    place: int


class BlockMover(Protocol):
    """Copies between tiers. What `start_…` begins is the mover's until it is answered: it may write to the
    places that a copy goes to, and reads those that it comes from, whoever has lost interest in it."""

    def start_load(self, ticket: int, loads: Sequence[Load], most_s: float) -> bool:
        """In order, each verified, given up `most_s` seconds after it has begun; later answered by
        `PrefixCache.on_loaded`. False: too many are open."""
        ...

    def start_store(self, ticket: int, stores: Sequence[Store]) -> bool:
        """Device blocks → host slots, later answered by `PrefixCache.on_stored`. False: too many are open."""
        ...

    def finish_store(self, ticket: int) -> bool:
        """Returns when that copy has ended, before anything else is copied; whether its bytes are there. Its
        answer may still come, and means nothing any more."""
        ...

    def store(self, stores: Sequence[Store]) -> float:
        """Device blocks → host slots at once, the last of several that name one slot. Seconds it took."""
        ...

    def seal(self, place: int, name: BlockHash) -> None:
        """That host slot was filled by somebody else with what is called `name`."""
        ...

    def start_write(self, source: int, node: StoredBlock) -> bool:
        """Host slot → the node's disk slot, later answered by `PrefixCache.on_written`. False: too many are
        open."""
        ...

    def start_send(self, source: int, node: StoredBlock) -> bool:
        """Host slot → the node's slot at a peer, later answered by `PrefixCache.on_sent`. False: too many are
        open."""
        ...

    def start_read(self, place: int, target: int, name: BlockHash) -> bool:
        """Disk slot → host slot, later answered by `PrefixCache.on_read`. False: too many are open."""
        ...
