"""What `packer` writes down: its rules, a line for each sequence, its counts. No decisions."""

from dataclasses import dataclass

from shared.messages.sequence import SequenceRef


@dataclass(frozen=True, slots=True)
class PackingRules:
    """How much of a worker is packed, and how long a sequence is waited for or left alone."""

    share: float = 0.85
    """Of a worker's blocks that are packed; the rest is for growth between epochs and for moves."""
    most_sequences: int = 64
    """On one worker: each counts as at least so small a share of it."""
    patience_s: float = 5.0
    """A placed sequence is waited for."""
    move_patience_s: float = 30.0
    """A move that nobody reported on is forgotten."""
    calm_s: float = 3.0
    """A sequence that was moved, or whose move failed, is left alone for so long."""

    def capacity(self, total_blocks: int) -> int:
        """Of a worker of so many, that are packed."""
        return max(1, int(self.share * total_blocks))


@dataclass(slots=True)
class PackedSequence:
    """A sequence in the packer's books: its size there, and where it was seen last."""

    ref: SequenceRef
    blocks: int
    heard_s: float
    worker_id: str | None = None
    """Where it was seen last; None: placed, and not seen yet."""
    moving_s: float | None = None
    calm_until_s: float = float("-inf")


@dataclass(slots=True)
class PackingCounts:
    """How many moves there were since the start, for `status`."""

    ordered: int = 0
    moved: int = 0
    failed: int = 0
    strays: int = 0
    """Seen running where the books had no room for them."""
