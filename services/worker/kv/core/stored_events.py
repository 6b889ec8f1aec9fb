"""What a prefix cache gains and loses, as vLLM tells it: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`.

For readers outside who route by what is cached. The structures are those of vLLM 0.32 (a batch is
an array, an event a map with its `type`): a block is its name (`shared.blocks`), its parent's name,
its tokens, and a medium. Of blocks whose tokens were never seen here (restored from disk) nothing is told.
Bounded: where more has changed than is kept between two looks, everything is cleared and told anew. Pure;
used on the cache's own thread.
"""

from collections.abc import Sequence

import msgspec

from services.worker.kv.core.radix_tree import PrefixTree, Tier
from shared.blocks import BlockHash

_MOST_CHANGED = 65_536
_MOST_NAMED = 1_048_576
"""Blocks with tokens, above which those that are not stored are looked for."""
MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE", Tier.PEER: "PEER"}
"""As vLLM calls them, but for the last, which it has not; a CPU worker's own pool is its device."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks that follow one another have got a place."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks have lost a place."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Nothing that was told before is true any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """`ts`: seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class StoredEvents:
    """Of one worker. `on_named` hears of a block's tokens, `on_moved` that it gained or lost a place."""

    def __init__(self, tree: PrefixTree, block_tokens: int) -> None:
        self._tree = tree
        self._block_tokens = block_tokens
        self._named: dict[BlockHash, tuple[BlockHash | None, Sequence[int]]] = {}
        """Parent and tokens: of blocks that are stored, or about to be."""
        self._told: dict[BlockHash, frozenset[Tier]] = {}
        self._changed: dict[BlockHash, None] = {}
        self._is_lost = True
        """Readers may know of an earlier start."""

    def on_named(self, name: BlockHash, parent: BlockHash | None, tokens: Sequence[int]) -> None:
        """A block is about to be stored under that name."""
        if name not in self._named:
            self._named[name] = (parent, tokens)

    def on_moved(self, name: BlockHash) -> None:
        """It has another place, or one less."""
        if len(self._changed) < _MOST_CHANGED:
            self._changed[name] = None
        else:
            self._is_lost = True

    def take(self) -> list[Event]:
        """What has changed since the last call, in the order in which it began to."""
        events: list[Event] = []
        changed: list[BlockHash] = list(self._changed)
        self._changed = {}
        if len(self._named) > _MOST_NAMED:
            self._forget()
        if self._is_lost:
            self._is_lost = False
            self._told = {}
            events.append(AllBlocksCleared())
            changed = [node.name for node in self._tree]
        for name in changed:
            self._compare(name, events)
        return events

    def _forget(self) -> None:
        """Names that were offered and not stored."""
        for name in list(self._named):
            node = self._tree.find(name)
            if (node is None or not node.stored) and name not in self._told:
                del self._named[name]

    def _compare(self, name: BlockHash, events: list[Event]) -> None:
        node = self._tree.find(name)
        places = () if node is None else node.places
        now = frozenset(tier for tier, place in zip(Tier, places, strict=False) if place is not None)
        known = self._named.get(name)
        before = self._told.get(name, frozenset())
        events.extend(BlockRemoved([name], MEDIUMS[tier]) for tier in sorted(before - now))
        if known is not None:
            for tier in sorted(now - before):
                self._store(name, *known, MEDIUMS[tier], events)
        if now and known is not None:
            self._told[name] = now
        else:
            self._told.pop(name, None)
        if not now:
            self._named.pop(name, None)

    def _store(
        self,
        name: BlockHash,
        parent: BlockHash | None,
        tokens: Sequence[int],
        medium: str,
        events: list[Event],
    ) -> None:
        """An event of its own, or the next block of the last one."""
        last = events[-1] if events else None
        if isinstance(last, BlockStored) and last.medium == medium and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(tokens)
        else:
            events.append(BlockStored([name], parent, list(tokens), self._block_tokens, None, medium, None))

    def check_integrity(self) -> None:
        """AssertionError when something is told as stored that nobody can name."""
        assert self._told.keys() <= self._named.keys()
        assert all(self._told.values())
