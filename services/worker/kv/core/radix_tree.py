"""Which blocks are stored, and where: a tree of named blocks, each with a place in some tiers.

A node's parent is the block before it, so that any stored prefix is found, not only a declared one. A node
without a place is no longer in the tree; what hangs below it cannot be reached and goes with it. Pure:
no bytes, no order of eviction. Source: papers/002 §X (the trie it wished for); `algorithms.md` §5.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import islice

from shared.blocks import BlockHash


class Tier(IntEnum):
    """Where a block's bytes can lie. The numbers are told to placement; for the order see `NEAREST_FIRST`."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    PEER = 3
    """Host memory that other workers lend."""


_KEPT_MOVES = 65_536
_NOWHERE: list[int | None] = [None] * len(Tier)
NEAREST_FIRST = (Tier.DEVICE, Tier.HOST, Tier.PEER, Tier.DISK)


class Node:
    """One stored block. `places[tier]` is its block id or slot there, None where it is not."""

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
        """Blocks before it."""
        self.places: list[int | None] = [None] * len(Tier)
        self.children: dict[BlockHash, Node] = {}
        self.kids = [0] * len(Tier)
        """Children with a place in each tier."""
        self.busy = 0
        """Users of it: who holds its device block, or waits for it, and the load that brings it there."""
        self.keepers = 0
        """Sequences taken off the device that come back for it: its copy on the host stays."""
        self.kept_slot: int | None = None
        """The slot on the host that is set aside for it, until its bytes have to go there."""
        self.arriving = False
        """It is on its way to the device: the block it goes to is nobody's else, and not its place yet."""
        self.storing = 0
        """The ticket of its copy that is on its way to the host; 0: none is."""
        self.is_leaving = False
        """One of the next to leave the device: its copy on the host is about to be the only one."""
        self.is_outside = False
        """Its block is in use from its copy on the host, and not on the device: that copy stays."""
        self.is_shadow = False
        """Kept on the host for another worker's sequence, and used by none here yet."""
        self.inserted = 0
        self.used = 0
        """When it was stored and last wanted, on the cache's own count of requests; see `eviction.NEVER`."""
        self.hits = 0
        self.tenant = ""
        """Who had it stored: tenants share none."""

    @property
    def stored(self) -> bool:
        return self.places != _NOWHERE

    @property
    def nearest(self) -> Tier:
        """The nearest tier it has a place in. Raises ValueError when there is none."""
        for tier in NEAREST_FIRST:
            if self.places[tier] is not None:
                return tier
        raise ValueError("the block is stored nowhere")

    def is_loose(self, tier: Tier) -> bool:
        """Whether its copy in `tier` may go: nobody uses it or, on the host, keeps it or has its block there,
        and no child's copy there hangs on it."""
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
        """The nodes of the longest stored prefix of `names`, a chain from the first block on."""
        found: list[Node] = []
        for name in names:
            node = self._nodes.get(name)
            if node is None or not node.stored:  # one that somebody waits for may have lost what it had
                break
            found.append(node)
        return found

    def add(self, name: BlockHash, parent: Node | None) -> Node:
        """A new node, to be given a place at once. Raises ValueError for a name that is there."""
        if name in self._nodes:
            raise ValueError("a block of this name is stored already")
        node = self._nodes[name] = Node(name, parent)
        if parent is not None:
            parent.children[name] = node
        return node

    def put(self, node: Node, tier: Tier, place: int) -> None:
        """`node` has a copy in `tier` from now on. Raises ValueError when it has one."""
        if node.places[tier] is not None:
            raise ValueError(f"the block has a place in {tier.name} already")
        node.places[tier] = place
        self.moves += 1
        self._moved.append(node.name)
        if node.parent is not None:
            node.parent.kids[tier] += 1

    def take(self, node: Node, tier: Tier) -> int:
        """The copy in `tier` is gone; returns where it was. Raises ValueError when there is none."""
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
        """Everything that hangs on `node`, deepest last, itself not included."""
        found: list[Node] = []
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            found.append(child)
            stack += child.children.values()
        return sorted(found, key=lambda child: child.depth)

    def check_integrity(self) -> None:
        """Raises AssertionError when counts, links or places contradict each other."""
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
