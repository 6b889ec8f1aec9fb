"""Copies to the host what is about to leave the device, before it has to: eviction then copies nothing. Pure.

An eighth of the device is free, or could go at once because the host has it as well or is not to have it
(`Inventory.is_worth_a_copy`). What is copied may be used, shared and counted as evictable meanwhile; it
leaves its block only after its copy has ended. Several blocks are one copy: each wakes a thread, and on a GPU
waits for the device.
"""

from collections import deque
from itertools import islice

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import BlockMover, Store

_SHARE = 8
"""One block in so many."""
_MOST_TOGETHER = 8
"""Blocks of one copy: who needs one of them at once waits for all."""
_MOST_ADOPTED = 4
"""Sealed at a time: a checksum each, and the engine waits for it."""


class SaveAhead:
    """Stores of one cache, by ticket. Half of the host at most is taken by what the device still has."""

    def __init__(self, books: Inventory, mover: BlockMover) -> None:
        self._books = books
        self._mover = mover
        self._next: deque[Node] = deque()
        """Chosen, and not begun."""
        self._leaving: list[Node] = []
        """Those of the last choice."""
        self._open: dict[int, list[tuple[Node, int]]] = {}
        """The blocks that are copied, and their slots, which are the ticket's until it is answered."""
        self._storing = self._tickets = 0
        self._unworthy = 0
        """Of the last choice those that leave without a copy."""
        self._evicted = 0
        """When it was made, of all time."""
        books.end_copy = self.finish

    @property
    def slots(self) -> list[int]:
        """On the host, that are being filled."""
        return [place for copy in self._open.values() for _, place in copy]

    @property
    def ready_blocks(self) -> int:
        """Of the device, that can be had without a copy, or soon."""
        unworthy = self._unworthy - (self._books.counts["evicted_device"] - self._evicted)
        return self._books.pool.free_blocks + self._books.saved + self._storing + max(0, unworthy)

    def work(self) -> int:
        """Start what copies are missing and may be open; returns how many began."""
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

    def on_stored(self, ticket: int, *, ok: bool) -> None:
        """A copy has ended. One that was waited for has been told of already."""
        copy = self._open.pop(ticket, [])
        self._storing -= len(copy)
        for node, place in copy:
            node.storing = 0
            if ok and self._books.tree.find(node.name) is node and node.places[Tier.HOST] is None:
                self._books.put(node, Tier.HOST, place)
            else:
                self._books.give_host_slot(node, place)

    def finish(self, node: Node) -> None:
        """Its copy, if one is under way, is over on return."""
        if node.storing:
            ticket = node.storing
            self.on_stored(ticket, ok=self._mover.finish_store(ticket))

    def _choose(self) -> bool:
        """Whether there is something to copy."""
        goal = min(self._books.pool.total_blocks // _SHARE, self._books.host.total // 2)
        if not goal or (self.ready_blocks > goal - goal // 4 and not self._books.is_behind):
            return False
        self._books.is_behind = False
        leaving = list(islice(self._books.leaving(), max(0, goal - self._books.pool.free_blocks)))
        kept = set(leaving)
        for node in self._leaving:
            if node not in kept and node.is_leaving:
                self._books.set_leaving(node, is_leaving=False)
        for node in leaving:
            self._books.set_leaving(node, is_leaving=True)
        self._leaving = leaving
        self._unworthy = sum(not self._books.is_worth_a_copy(node) for node in leaving)
        self._evicted = self._books.counts["evicted_device"]
        self._next.extend(node for node in leaving if self._is_wanted(node))
        return bool(self._next)

    def _is_wanted(self, node: Node) -> bool:
        """It is about to leave, and the host has no copy of it."""
        is_there = node.is_leaving and self._books.is_worth_a_copy(node)
        return is_there and node.places[Tier.HOST] is None and not node.storing

    def _start(self, copy: list[tuple[Node, int]]) -> int:
        """How many began: all of them, or none where too many are open, and they are the next again."""
        if not copy:
            return 0
        self._tickets += 1
        stores = [Store(node.name, block_of(node), place) for node, place in copy]
        if not self._mover.start_store(self._tickets, stores):
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
    """Where it is on the device."""
    block = node.places[Tier.DEVICE]
    assert block is not None
    return block
