"""What goes to disk at a clean stop, so that the worker's next life finds it: the blocks wanted last. Pure.

As many as the disk has slots, each with all that precedes it, because without its beginning a block cannot be
found. What is on disk already and belongs to them stays; the rest gives its slots to those that are only in
memory. They are written in the order of their worth, so that whatever ends it early costs least.
"""

from collections.abc import Callable

from services.worker.kv.inventory import Inventory
from services.worker.kv.mover import StoredBlock
from services.worker.kv.tree import Node, Tier

Write = Callable[[StoredBlock, Tier, int], bool]
"""Copies a block from a place in a tier to its slot on disk; whether it is there now."""


def worth_keeping(books: Inventory) -> list[Node]:
    """The last wanted of the stored blocks, as many as disk takes; what precedes a block comes before it."""
    kept: dict[Node, None] = {}
    stored = (node for node in books.tree if node.stored)
    for node in sorted(stored, key=lambda node: (-node.used, -node.hits, node.depth)):
        path: list[Node] = []
        above: Node | None = node
        while above is not None and above not in kept:
            path.append(above)
            above = above.parent
        if len(kept) + len(path) <= books.disk.total and all(one.stored for one in path):
            kept.update(dict.fromkeys(reversed(path)))
    return list(kept)


def flush(books: Inventory, write: Write, may_go_on: Callable[[], bool]) -> tuple[int, int]:
    """Write what is worth keeping and not on disk. Returns how many blocks were written, and how many were
    not. Nothing may be in flight."""
    kept = worth_keeping(books)
    missing = [node for node in kept if node.places[Tier.DISK] is None]
    spare = sorted(
        (node for node in books.tree if node.places[Tier.DISK] is not None and node not in set(kept)),
        key=lambda node: (node.used, node.hits, -node.depth),
        reverse=True,
    )
    written = 0
    for node in missing:
        if not may_go_on():
            break
        place = _slot(books, spare)
        if place is None:
            break
        tier = node.nearest
        source = node.places[tier]
        parent = b"" if node.parent is None else node.parent.name
        if source is not None and write(StoredBlock(node.name, parent, node.depth, place), tier, source):
            books.put(node, Tier.DISK, place)
            books.unsaved.pop(node, None)
            written += 1
        else:
            books.disk.give(place)
    return written, len(missing) - written


def _slot(books: Inventory, spare: list[Node]) -> int | None:
    """A free one, else that of the least of `spare`."""
    place = books.disk.take()
    while place is None and spare:
        victim = spare.pop()
        if victim.places[Tier.DISK] is not None:  # it may have gone along with another
            books.remove(victim, Tier.DISK)
        place = books.disk.take()
    return place
