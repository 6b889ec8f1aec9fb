"""The cache between two iterations, as transfers use it; nothing stays behind when one ends halfway."""

from typing import cast

from services.worker.kv.settings import PrefixCacheConfig
from services.worker.runner import Runner
from services.worker.transfer.ledge import Ledge
from shared.blocks import chain, root
from shared.messages.sequence import pack_tokens
from tests.services.worker.prefix_rig import BLOCK_TOKENS, DEVICE_BLOCKS, PrefixRig, make_engine
from tests.services.worker.transfer.rig import SameThread

NAMES = chain(root(b"f"), pack_tokens(range(8 * BLOCK_TOKENS)), BLOCK_TOKENS)


def test_blocks_get_their_names_when_they_have_arrived() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig(host_mb=0))
    assert rig.store is not None
    cache = rig.store.cache
    ledge = Ledge(cast(Runner, SameThread()), cache)
    blocks = ledge.make_room(4).result()
    assert ledge.take_in(blocks, NAMES[:3], None).result() == 3, "the fourth did not arrive"
    assert ledge.known_blocks(NAMES).result() == 3
    assert cache.free_blocks + cache.evictable_blocks == DEVICE_BLOCKS
    more = ledge.make_room(2).result()
    assert ledge.take_in(more, NAMES[5:7], NAMES[4]).result() == 0, "what precedes them is not there"
    held = ledge.hold(NAMES[1:6]).result()
    assert len(held) == 2 and cache.evictable_blocks == 0
    ledge.let_go(held)
    assert cache.evictable_blocks == 3
    cache.check_integrity([])
    rig.store.close(5.0)


def test_room_is_made_only_where_as_much_stays_free() -> None:
    rig = PrefixRig(make_engine(), PrefixCacheConfig(host_mb=0))
    assert rig.store is not None
    ledge = Ledge(cast(Runner, SameThread()), rig.store.cache)
    assert ledge.make_room(DEVICE_BLOCKS // 2 + 1).result() == []
    assert len(ledge.make_room(DEVICE_BLOCKS // 2).result()) == DEVICE_BLOCKS // 2
    rig.store.close(5.0)
