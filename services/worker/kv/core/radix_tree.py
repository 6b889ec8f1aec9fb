"""The tree of stored blocks: each node is a named block with a place in some tiers. Pure.

A node's parent is the block before it, so any stored prefix is found. A node without a place leaves the tree,
with everything below it. Source: papers/002 §X; `algorithms.md` §5."""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import islice

from shared.blocks import BlockHash


class Tier(IntEnum):
    """A place for a block's bytes. The numbers are part of messages; `NEAREST_FIRST` is the order."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    PEER = 3
    """Host memory lent by other workers."""


_KEPT_MOVES = 8192
_NOWHERE: list[int | None] = [None] * len(Tier)
NEAREST_FIRST = (Tier.DEVICE, Tier.HOST, Tier.PEER, Tier.DISK)


class Node:
    """One stored block. `places[tier]` is its block id or slot in a tier; None: it is not there."""

    __slots__ = (
        "arriving",
        "busy",
        "children",
        "depth",
        "hits",
        "inserted",
        "is_leaving",
        "is_outside",
        "is_shadow",
        "keepers",
        "kept_slot",
        "kids",
        "name",
        "parent",
        "places",
        "storing",
        "tenant",
        "used",
    )

    def __init__(self, name: BlockHash, parent: "Node | None") -> None:
        self.name = name
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Number of blocks before it."""
        self.places = _NOWHERE.copy()
        self.children: dict[BlockHash, Node] = {}
        self.kids = [0, 0, 0, 0]
        """Number of children with a place in each tier."""
        self.busy = 0
        """Number of users: sequences that hold or await it, its load, and children in use."""
        self.keepers = 0
        """Number of preempted sequences that will use it: its copy on the host stays."""
        self.kept_slot: int | None = None
        """The host slot reserved for it, until it leaves the device."""
        self.arriving = False
        """A load brings it to the device; the target block is not its place yet."""
        self.storing = 0
        """The ticket of its copy to the host that is under way; 0: none."""
        self.is_leaving = False
        """It is one of the next to leave the device."""
        self.is_outside = False
        """Its block in use lies in its host copy and not on the device, so that copy stays."""
        self.is_shadow = False
        """It is kept on the host for another worker's sequence and unused here."""
        self.inserted = 0
        self.used = 0
        """Number of requests counted when it was stored, and when it was last used; see `eviction.NEVER`."""
        self.hits = 0
        self.tenant = ""
        """The tenant that stored it; tenants share no blocks."""

    @property
    def stored(self) -> bool:
        return self.places != _NOWHERE

    @property
    def nearest(self) -> Tier:
        """The nearest tier with a copy. Raises ValueError when there is none."""
        for tier in NEAREST_FIRST:
            if self.places[tier] is not None:
                return tier
        raise ValueError("the block is stored nowhere")

    def is_loose(self, tier: Tier) -> bool:
        """Whether its copy in `tier` is evictable: unused, not kept, and without a child in that tier."""
        is_wanted = self.busy or (tier is Tier.HOST and (self.keepers or self.is_outside))
        return self.places[tier] is not None and not is_wanted and not self.kids[tier]


class PrefixTree:
    """The stored blocks, found by name and as prefixes, and a journal of the latest moves."""

    def __init__(self) -> None:
        self._nodes: dict[BlockHash, Node] = {}
        self.moves = 0
        """Number of places that blocks have gained or lost so far."""
        self._moved: deque[BlockHash] = deque(maxlen=_KEPT_MOVES)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, name: BlockHash) -> Node | None:
        return self._nodes.get(name)

    def moved_since(self, moves: int) -> list[BlockHash] | None:
        """Names of the blocks moved since `moves` had that value, each once. None: not all are known."""
        count = self.moves - moves
        if count > len(self._moved):
            return None
        latest = list(islice(reversed(self._moved), count))
        return list(dict.fromkeys(reversed(latest)))

    def match(self, names: Sequence[BlockHash]) -> list[Node]:
        """Return the nodes of the longest stored prefix of `names`."""
        found: list[Node] = []
        for name in names:
            node = self._nodes.get(name)
            if node is None or not node.stored:  # An awaited block may have lost its copies.
                break
            found.append(node)
        return found

    def add(self, name: BlockHash, parent: Node | None) -> Node:
        """Add a node, which needs a place at once. Raises ValueError for a stored name."""
        if name in self._nodes:
            raise ValueError("a block of this name is stored already")
        node = self._nodes[name] = Node(name, parent)
        if parent is not None:
            parent.children[name] = node
        return node

    def put(self, node: Node, tier: Tier, place: int) -> None:
        """Record a copy in `tier`. Raises ValueError if there is one."""
        if node.places[tier] is not None:
            raise ValueError(f"the block has a place in {tier.name} already")
        node.places[tier] = place
        self.moves += 1
        self._moved.append(node.name)
        if node.parent is not None:
            node.parent.kids[tier] += 1

    def take(self, node: Node, tier: Tier) -> int:
        """Remove the copy in `tier` and return its place. Raises ValueError if there is none."""
        place = node.places[tier]
        if place is None:
            raise ValueError(f"the block has no place in {tier.name}")
        node.places[tier] = None
        self.moves += 1
        self._moved.append(node.name)
        if node.parent is not None:
            node.parent.kids[tier] -= 1
        return place

    def forget(self, node: Node) -> None:
        """Remove a node that has neither places nor children. Raises ValueError otherwise."""
        if node.stored or node.children:
            raise ValueError("only a leaf without a copy can be forgotten")
        del self._nodes[node.name]
        if node.parent is not None:
            del node.parent.children[node.name]

    def below(self, node: Node) -> list[Node]:
        """Return all nodes below `node`, deepest last."""
        found: list[Node] = []
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            found.append(child)
            stack += child.children.values()
        return sorted(found, key=lambda child: child.depth)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, links or places contradict each other."""
        for name, node in self._nodes.items():
            assert node.name == name and (node.stored or node.busy), "a node without a copy was left behind"
            assert node.busy >= 0 and node.keepers >= 0
            if node.parent is not None:
                assert self._nodes.get(node.parent.name) is node.parent, "a block cannot be reached"
                assert node.parent.children[name] is node
                if node.places[Tier.DEVICE] is not None:
                    assert node.busy or node.parent.places[Tier.DEVICE] is not None, (
                        "the device has it without its beginning"
                    )
                if node.busy:
                    assert node.parent.busy, "a block is used without its beginning"
            for tier in Tier:
                counted = sum(child.places[tier] is not None for child in node.children.values())
                assert node.kids[tier] == counted
