"""The cache between two iterations, as transfers use it; nothing stays behind when one ends halfway."""

import asyncio

from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.peers.migration.ledge import Ledge
from shared.blocks import chain, root
from shared.messages.sequence import pack_tokens
from tests.services.worker.peers.migration.rig import LONGEST_S, EngineDoor
from tests.services.worker.prefix_rig import BLOCK_TOKENS, DEVICE_BLOCKS, PrefixRig, make_engine

NAMES = chain(root(b"f"), pack_tokens(range(8 * BLOCK_TOKENS)), BLOCK_TOKENS)


async def test_blocks_get_their_names_when_they_have_arrived() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig(host_mb=0))
    assert rig.store is not None
    cache = rig.store.cache
    door = EngineDoor()
    ledge = Ledge(door, cache)
    blocks = await ledge.make_room(4)
    assert await asyncio.wrap_future(ledge.take_in(blocks, NAMES[:3], None)) == 3, "the fourth did not arrive"
    assert await asyncio.wrap_future(ledge.known_blocks(NAMES)) == 3
    assert cache.free_blocks + cache.evictable_blocks == DEVICE_BLOCKS
    more = await ledge.make_room(2)
    arrived = ledge.take_in(more, NAMES[5:7], NAMES[4])
    assert await asyncio.wrap_future(arrived) == 0, "what precedes them is not there"
    held = ledge.hold(NAMES[1:6], LONGEST_S)
    assert len(held) == 2 and cache.evictable_blocks == 0
    ledge.let_go(held)
    door.close()
    assert cache.evictable_blocks == 3
    cache.check_integrity([])
    rig.store.close(5.0)


async def test_room_is_made_only_where_as_much_stays_free() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig(host_mb=0))
    assert rig.store is not None
    door = EngineDoor()
    ledge = Ledge(door, rig.store.cache)
    assert await ledge.make_room(DEVICE_BLOCKS // 2 + 1) == []
    assert len(await ledge.make_room(DEVICE_BLOCKS // 2)) == DEVICE_BLOCKS // 2
    door.close()
    rig.store.close(5.0)
