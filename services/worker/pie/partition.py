"""Where slots lie in the device's memory, and how they change size in place. Pure.

A fixed number of blocks of one layer is cut into slots of equal size. There is no second place to make
larger slots in (the paper's are reallocated elsewhere), so they are shifted within it, in an order in which
none overwrites another. Source: papers/004 §4.1; docs/decisions/0015-pie.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shift:
    """Move the contents of one slot, `blocks` blocks at most, from one block of the memory to another."""

    slot: int
    from_block: int
    to_block: int
    blocks: int


class Partition:
    """`arena_blocks` blocks in `slots` slots."""

    def __init__(self, arena_blocks: int, slots: int) -> None:
        if not 1 <= slots <= arena_blocks:
            raise ValueError(f"{slots} slots in {arena_blocks} blocks")
        self.arena_blocks = arena_blocks
        self.slots = slots

    @property
    def slot_blocks(self) -> int:
        return self.arena_blocks // self.slots

    def first_block(self, slot: int) -> int:
        return slot * self.slot_blocks

    def resize(self, slots: int) -> list[Shift]:
        """Cut anew; the shifts to be made, in this order.

        With fewer slots the last ones must be empty, with more no slot may hold anything beyond its new size.
        """
        before, kept = self.slot_blocks, min(self.slots, slots)
        if not 1 <= slots <= self.arena_blocks:
            raise ValueError(f"{slots} slots in {self.arena_blocks} blocks")
        self.slots = slots
        after = self.slot_blocks
        order = range(kept - 1, 0, -1) if after > before else range(1, kept)
        blocks = min(before, after)
        return [Shift(slot, slot * before, slot * after, blocks) for slot in order if after != before]
