"""What a sequence finds stored: blocks on the device, and blocks that are on their way there. Pure."""

from dataclasses import dataclass

from services.worker.kv.core.radix_tree import Node, Tier


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """Consecutive stored blocks, held for one who waits for them; each is brought by some load.

    Whoever has it gives it back once, by `PrefixCache.collect`, before or after the loads have ended.
    """

    nodes: tuple[Node, ...]
    tiers: tuple[Tier, ...]
    """Where each was found."""

    @property
    def is_over(self) -> bool:
        """No load is on the way with any of them, whether it brought something or not."""
        return not any(node.arriving for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Hit:
    """The beginning of a prompt that need not be computed: its blocks, now held by who asked."""

    blocks: tuple[int, ...] = ()
    """On the device."""
    loaded: tuple[int, int, int] = (0, 0, 0)
    """Of `blocks`, those found on the device, the host and disk."""
    awaited: Awaited | None = None
    """What follows these and is being loaded; None: nothing is."""
    from_peers: int = 0
    """Of `blocks`, those found at peers."""
    ahead: int = 0
    """Stored blocks that follow all these, beyond what was asked for; nobody holds them."""

    @property
    def known_blocks(self) -> int:
        """On the device, or on the way there."""
        return len(self.blocks) + (0 if self.awaited is None else len(self.awaited.nodes))
