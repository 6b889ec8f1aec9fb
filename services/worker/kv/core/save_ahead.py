"""Copies blocks to the host ahead of eviction, so that an eviction copies nothing. Pure.

An eighth of the device, or 1,024 blocks, is kept free or ready to leave: the host has a copy, or a copy is
not worth it (`Inventory.is_worth_a_copy`). A block may be used, shared and evictable during its copy; its
device block is free only after the copy. Several blocks share a copy, since each copy wakes a thread."""

from collections import deque
from functools import partial
from itertools import islice

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import BlockMover, Store

_SHARE = 8
"""One block in so many is kept ready, up to `_MOST_READY`: each costs the engine's thread some time."""
_MOST_READY = 1024
_MOST_TOGETHER = 8
"""Maximum number of blocks in a copy; an eviction of one waits for all."""
_MOST_ADOPTED = 4
"""Maximum number of blocks adopted between two steps: each needs a checksum."""


class SaveAhead:
    """The copies of one cache, by ticket. At most half of the host holds blocks still on the device."""

    def __init__(self, books: Inventory, mover: BlockMover) -> None:
        self._books = books
        self._mover = mover
        self._next: deque[Node] = deque()
        """Blocks chosen, but not copied yet."""
        self._leaving: list[Node] = []
        """Blocks of the last choice."""
        self._open: dict[int, list[tuple[Node, int]]] = {}
        """Blocks being copied and their slots, which belong to the ticket until it is answered."""
        self._storing = self._tickets = 0
        self._unworthy = 0
        """Number of blocks of the last choice that are not worth a copy."""
        self._evicted = 0
        """Count of evictions at the last choice."""
        books.end_copy = self.finish

    @property
    def slots(self) -> list[int]:
        """Host slots that are being filled."""
        return [place for copy in self._open.values() for _, place in copy]

    @property
    def ready_blocks(self) -> int:
        """Number of device blocks that are available without a copy, or soon."""
        unworthy = self._unworthy - (self._books.counts["evicted_device"] - self._evicted)
        return self._books.pool.free_blocks + self._books.saved + self._storing + max(0, unworthy)

    def work(self) -> int:
        """Start missing copies; return the number of blocks started."""
        if not self._next and not self._choose():
            return 0
        started = adopted = 0
        copy: list[tuple[Node, int]] = []
        while self._next:
            node = self._next[0]
            if not self._is_wanted(node):
                self._next.popleft()
                continue
            if self._books.own_row(node) is not None:
                if adopted == _MOST_ADOPTED:
                    break
                adopted += 1
                if not self.adopt(node):
                    self._next.clear()
                    break
                self._next.popleft()
                continue
            place = self._books.host_slot(node, ahead=True)
            if place is None:
                self._next.clear()
                break
            self._next.popleft()
            copy.append((node, place))
            if len(copy) == _MOST_TOGETHER:
                begun = self._start(copy)
                started, copy = started + begun, []
                if not begun:
                    break
        return started + self._start(copy)

    def adopt(self, node: Node) -> bool:
        """Share the block's own row of host memory with the cache instead of copying; whether it has one."""
        row = self._books.own_row(node)
        if row is None or not self._books.adopt(node):
            return False
        self._mover.seal(row, node.name)
        self._books.put(node, Tier.HOST, row)
        return True

    def _on_stored(self, ticket: int, ok: bool) -> None:
        """Apply the end of a copy. `finish` may have applied it already."""
        copy = self._open.pop(ticket, [])
        self._storing -= len(copy)
        for node, place in copy:
            node.storing = 0
            if ok and self._books.tree.find(node.name) is node and node.places[Tier.HOST] is None:
                self._books.put(node, Tier.HOST, place)
            else:
                self._books.give_host_slot(node, place)

    def finish(self, node: Node) -> None:
        """Finish the block's copy, if one is under way."""
        if node.storing:
            self._on_stored(node.storing, self._mover.finish_store(node.storing))

    def _choose(self) -> bool:
        """Choose the next blocks to copy; whether there are any."""
        goal = min(self._books.pool.total_blocks // _SHARE, self._books.host.total // 2, _MOST_READY)
        if not goal or (self.ready_blocks > goal - goal // 4 and not self._books.is_behind):
            return False
        self._books.is_behind = False
        leaving = list(islice(self._books.device.preview(), max(0, goal - self._books.pool.free_blocks)))
        kept = set(leaving)
        for node in self._leaving:
            if node not in kept and node.is_leaving:
                node.is_leaving = False
                self._books.rank(node)
        for node in leaving:
            node.is_leaving = True
            self._books.rank(node)
        self._leaving = leaving
        self._unworthy = sum(not self._books.is_worth_a_copy(node) for node in leaving)
        self._evicted = self._books.counts["evicted_device"]
        self._next.extend(node for node in leaving if self._is_wanted(node))
        return bool(self._next)

    def _is_wanted(self, node: Node) -> bool:
        """Whether it is about to leave the device and still needs a copy."""
        is_there = node.is_leaving and self._books.is_worth_a_copy(node)
        return is_there and node.places[Tier.HOST] is None and not node.storing

    def _start(self, copy: list[tuple[Node, int]]) -> int:
        """Start a copy; return its number of blocks, or 0 when too many are open: they are retried."""
        if not copy:
            return 0
        self._tickets += 1
        stores = [Store(node.name, block_of(node), place) for node, place in copy]
        if not self._mover.start_store(self._tickets, stores, partial(self._on_stored, self._tickets)):
            for node, place in reversed(copy):
                self._books.give_host_slot(node, place)
                self._next.appendleft(node)
            return 0
        for node, _ in copy:
            node.storing = self._tickets
        self._open[self._tickets] = copy
        self._storing += len(copy)
        self._books.counts["saved_ahead"] += len(copy)
        return len(copy)


def block_of(node: Node) -> int:
    """Return its block id on the device."""
    block = node.places[Tier.DEVICE]
    assert block is not None
    return block
