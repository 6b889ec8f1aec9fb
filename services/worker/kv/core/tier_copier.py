"""Copies of blocks between tiers: their descriptions, the protocol of the mover, and hits that wait. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class Load:
    """A copy of a stored block to the device."""

    name: BlockHash
    tier: Tier
    """Source: HOST, PEER or DISK."""
    place: int
    block: int
    """Target block on the device."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a list of loads: the first `done` hold verified bytes."""

    done: int
    elapsed_s: tuple[float, ...] = (0.0,) * len(Tier)
    """Time by tier of the loads that were done."""
    failed: bool = False
    """The next load was torn, corrupt or of another model; False: it was abandoned."""
    wasted_s: float = 0.0
    """Time spent on the next load."""


@dataclass(frozen=True, slots=True)
class Store:
    """A copy of a device block to a host slot."""

    name: BlockHash
    block: int
    place: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in, or for, a slot of the disk or of a peer."""

    name: BlockHash
    parent: BlockHash
    """Empty for a first block."""
    depth: int
    place: int


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """Consecutive stored blocks, held for a sequence that waits until loads bring them to the device. Its
    owner ends it once by `PrefixCache.collect`, before or after the loads have ended."""

    nodes: tuple[Node, ...]
    tiers: tuple[Tier, ...]
    """The tier in which each was found."""

    @property
    def is_over(self) -> bool:
        """Whether no load of these blocks is under way."""
        return not any(node.arriving for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Hit:
    """The stored beginning of a prompt: blocks that its sequence now holds."""

    blocks: tuple[int, ...] = ()
    """Blocks on the device."""
    loaded: tuple[int, int, int] = (0, 0, 0)
    """Number of `blocks` found on the device, the host and disk."""
    awaited: Awaited | None = None
    """The blocks after these that are being loaded; None: there are none."""
    from_peers: int = 0
    """Number of `blocks` found at peers."""
    ahead: int = 0
    """Number of stored blocks after all these, beyond those asked for; they are not held."""

    @property
    def known_blocks(self) -> int:
        """Number of blocks on the device, or on the way there."""
        return len(self.blocks) + (0 if self.awaited is None else len(self.awaited.nodes))


class BlockMover(Protocol):
    """Copies blocks between tiers. `ended` gets the result once, between two steps; until then source and
    target belong to the mover. The calls that start a copy return False when too many are open."""

    def start_load(self, loads: Sequence[Load], most_s: float, ended: Callable[[Loaded], None]) -> bool:
        """Start verified loads in order, abandoned after `most_s` seconds."""
        ...

    def start_store(self, ticket: int, stores: Sequence[Store], ended: Callable[[bool], None]) -> bool:
        """Start copies to host slots."""
        ...

    def finish_store(self, ticket: int) -> bool:
        """Finish that copy ahead of all others; whether it worked."""
        ...

    def store(self, stores: Sequence[Store]) -> float:
        """Copy device blocks to host slots now; return the seconds it took. The last of several copies to one
        slot counts."""
        ...

    def seal(self, place: int, name: BlockHash) -> None:
        """Take the checksum of a host slot that another part filled with block `name`."""
        ...

    def start_write(self, tier: Tier, source: int, node: StoredBlock, ended: Callable[[bool], None]) -> bool:
        """Start a copy from the host to the disk or a peer."""
        ...

    def start_read(self, place: int, target: int, name: BlockHash, ended: Callable[[bool], None]) -> bool:
        """Start a copy from disk to host."""
        ...
