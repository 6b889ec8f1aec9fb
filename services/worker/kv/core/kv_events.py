"""KV events in vLLM's format: `BlockStored`, `BlockRemoved`, `AllBlocksCleared`.

For external routers that route by cached prefixes. The structures are those of vLLM 0.32: a batch is an
array, and an event is a map with a `type`. A block has a name (`shared.blocks`), its parent's name, tokens
and a medium. Blocks restored from disk are left out: their tokens are unknown. After too many changes between
two calls, the events clear everything and list it again. Pure; used on the cache's thread."""

from collections.abc import Sequence

import msgspec

from services.worker.kv.core.radix_tree import PrefixTree, Tier
from shared.blocks import BlockHash

_MOST_NAMED = 1_048_576
"""Number of blocks with tokens above which those that are not stored are forgotten."""
MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE", Tier.PEER: "PEER"}
"""vLLM's names, except `PEER`, which vLLM lacks. A CPU worker's own pool is its device."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Consecutive blocks gained a place."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """Blocks lost a place."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True, frozen=True):
    """All earlier events are void."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """One message; `ts` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class StoredEvents:
    """The events of one worker, read from the journal of its tree. `on_named` adds the tokens of a block."""

    def __init__(self, tree: PrefixTree, block_tokens: int) -> None:
        self._tree = tree
        self._block_tokens = block_tokens
        self._named: dict[BlockHash, tuple[BlockHash | None, Sequence[int], str]] = {}
        """Parent, tokens and adapter of blocks that are stored, or about to be."""
        self._told: dict[BlockHash, frozenset[Tier]] = {}
        self._seen_moves = -1
        """-1: readers may remember an earlier start of the worker."""

    def on_named(
        self, name: BlockHash, parent: BlockHash | None, tokens: Sequence[int], adapter: str = ""
    ) -> None:
        """Remember the tokens of a block that is about to be stored."""
        if name not in self._named:
            self._named[name] = (parent, tokens, adapter)

    def take(self) -> list[Event]:
        """Return the changes since the last call, oldest first."""
        events: list[Event] = []
        changed = self._tree.moved_since(self._seen_moves) if self._seen_moves >= 0 else None
        self._seen_moves = self._tree.moves
        if len(self._named) > _MOST_NAMED:
            self._forget()
        if changed is None:
            self._told = {}
            events.append(AllBlocksCleared())
            changed = [node.name for node in self._tree]
        for name in changed:
            self._compare(name, events)
        return events

    def _forget(self) -> None:
        """Drop the tokens of blocks that were named but not stored."""
        for name in list(self._named):
            node = self._tree.find(name)
            if (node is None or not node.stored) and name not in self._told:
                del self._named[name]

    def _compare(self, name: BlockHash, events: list[Event]) -> None:
        node = self._tree.find(name)
        places = () if node is None else node.places
        now = frozenset(tier for tier, place in zip(Tier, places, strict=False) if place is not None)
        is_known = name in self._named
        before = self._told.get(name, frozenset())
        events.extend(BlockRemoved([name], MEDIUMS[tier]) for tier in sorted(before - now))
        if is_known:
            for tier in sorted(now - before):
                self._store(name, MEDIUMS[tier], events)
        if now and is_known:
            self._told[name] = now
        else:
            self._told.pop(name, None)
        if not now:
            self._named.pop(name, None)

    def _store(self, name: BlockHash, medium: str, events: list[Event]) -> None:
        """Append a block to the last event where it follows, else add an event."""
        parent, tokens, adapter = self._named[name]
        last = events[-1] if events else None
        if isinstance(last, BlockStored) and last.medium == medium and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(tokens)
        else:
            size, lora_name = self._block_tokens, adapter or None
            events.append(BlockStored([name], parent, list(tokens), size, None, medium, lora_name))

    def check_integrity(self) -> None:
        """Raise AssertionError if a block was announced whose tokens are unknown."""
        assert self._told.keys() <= self._named.keys()
        assert all(self._told.values())
