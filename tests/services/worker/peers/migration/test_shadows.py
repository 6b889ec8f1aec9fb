"""Copies of a running sequence at another worker: found when it moves there, and without delay for others."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.transfers import Route
from services.worker.peers.migration.settings import TransferConfig
from shared.blocks import chain, root
from shared.errors import KvasirError
from shared.messages.moves import PullBlocks
from shared.messages.sequence import pack_tokens
from tests.services.worker.peers.migration.rig import Side, pair
from tests.services.worker.prefix_rig import BLOCK_TOKENS

PROMPT = [3, 5, 7, 9, 11, 2, 4, 6, 8, 10, 12, 14, 16, 18, 1, 2, 3, 4, 5]
QUICK = TransferConfig(batch_blocks=2, shadow_link_share=1.0)


def order(tokens: list[int], source: str = "giver") -> PullBlocks:
    return PullBlocks(source=source, source_incarnation=1, tokens=pack_tokens(tokens), is_shadow=True)


@contextmanager
def two(host_blocks: int = 16, share: float = 0.5) -> Iterator[tuple[Side, Side]]:
    cached = PrefixCacheConfig(host_mb=0, host_blocks=host_blocks, shadow_share=share)
    with pair(QUICK, cached) as (giver, taker):
        yield giver, taker
        for side in (giver, taker):
            side.integrity()


def names(side: Side, tokens: list[int]) -> list[bytes]:
    assert side.rig.store is not None
    return chain(root(side.rig.store.fingerprint), pack_tokens(tokens), BLOCK_TOKENS)


def places(side: Side, tokens: list[int]) -> list[set[Tier]]:
    """Return the tiers of each stored block of it."""
    assert side.rig.store is not None
    found = side.rig.store.cache._books.tree.match(names(side, tokens))
    return [{tier for tier in Tier if node.places[tier] is not None} for node in found]


async def test_a_shadow_is_on_the_host_and_saves_its_computation() -> None:
    with two() as (giver, taker):
        answer = giver.rig.serve([PROMPT])
        store = taker.rig.store
        assert store is not None
        free = store.cache.free_blocks
        pulled = await taker.target.pull(order(PROMPT))
        assert (pulled.held_tokens, pulled.fetched_blocks) == (16, 4)
        assert places(taker, PROMPT) == [{Tier.HOST}] * 4 and store.cache.free_blocks == free
        assert len(store.cache.shadows) == 4
        for side in (giver, taker):
            assert side.rig.store is not None
            assert side.rig.store.transfers.figures[Route.SHADOW].copies > 0
            assert side.rig.store.transfers.figures[Route.PULL].copies == 0
        before = taker.rig.prefilled_tokens
        assert taker.rig.serve([PROMPT]) == answer
        assert taker.rig.prefilled_tokens - before == len(PROMPT) - 16
        assert store.cache.counts["shadows_used"] == 4 and len(store.cache.shadows) == 0


async def test_shadows_follow_a_running_sequence() -> None:
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        assert (await taker.target.pull(order(PROMPT[:9]))).fetched_blocks == 2
        assert (await taker.target.pull(order(PROMPT))).fetched_blocks == 2
        again = await taker.target.pull(order(PROMPT))
        assert (again.held_tokens, again.fetched_blocks) == (16, 0)


async def test_shadows_stay_within_their_share() -> None:
    with two(host_blocks=6, share=0.5) as (giver, taker):
        giver.rig.serve([PROMPT])
        assert (await taker.target.pull(order(PROMPT))).held_tokens == 12
        assert (await taker.target.pull(order(PROMPT))).fetched_blocks == 0


@pytest.mark.parametrize("host_blocks", [0, 4])
async def test_a_worker_without_shadows_reports_none(host_blocks: int) -> None:
    with two(host_blocks=host_blocks, share=0.0) as (giver, taker):
        giver.rig.serve([PROMPT])
        assert (await taker.target.pull(order(PROMPT))).held_tokens == 0
        assert taker.rig.core.report(0.0).shadow_room_blocks == 0


async def test_a_source_that_dies_leaves_whole_blocks_or_none() -> None:
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        await taker.target.pull(order(PROMPT[:9]))
        giver.plane.close()
        taker.target.forget("giver")
        with pytest.raises(KvasirError):
            await taker.target.pull(order(PROMPT))
        assert len(places(taker, PROMPT)) == 2


async def test_a_move_takes_shadows_to_the_device() -> None:
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        await taker.target.pull(order(PROMPT))
        moved = await taker.target.pull(msgspec.structs.replace(order(PROMPT), is_shadow=False))
        assert moved.held_tokens == 16
        assert all(Tier.DEVICE in found for found in places(taker, PROMPT))
        store = taker.rig.store
        assert store is not None and len(store.cache.shadows) == 0


async def test_a_shadow_behind_a_move_does_not_mark_the_link_as_failed() -> None:
    """A shadow that timed out behind a move marked the healthy link as failed for a minute."""
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        moving = taker.target._way("giver", 1)
        async with moving.lock:
            waited = await taker.target.pull(msgspec.structs.replace(order(PROMPT), valid_for_s=0.1))
        assert waited.held_tokens == 0 and taker.target.bytes_per_s("giver") != 0.0
        assert (await taker.target.pull(order(PROMPT))).held_tokens == 16


async def test_a_failed_shadow_does_not_mark_the_link_as_failed() -> None:
    """Shadows yield to all other copies at their source, so moves may work when a shadow fails."""
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        assert giver.rig.store is not None
        giver.rig.store.transfers.figures[Route.SHADOW].open = 64
        with pytest.raises(KvasirError):
            await taker.target.pull(order(PROMPT))
        assert taker.target.bytes_per_s("giver") != 0.0
        moved = await taker.target.pull(msgspec.structs.replace(order(PROMPT), is_shadow=False))
        assert moved.held_tokens == 16


async def test_a_move_does_not_wait_for_a_shadows_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow kept the link while it was written behind the disk's writes, for up to 5 s."""
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        host, may_write, is_writing = taker.target._host, Event(), Event()
        assert host is not None
        write = host.write

        def slow(*of: Any) -> int:
            is_writing.set()
            assert may_write.wait(20.0)
            return write(*of)

        monkeypatch.setattr(host, "write", slow)
        shadow = asyncio.create_task(taker.target.pull(order(PROMPT[:9])))
        try:
            assert await asyncio.to_thread(is_writing.wait, 20.0)
            moving = msgspec.structs.replace(order(PROMPT), is_shadow=False)
            moved = await asyncio.wait_for(taker.target.pull(moving), 10.0)
            assert moved.held_tokens == 16 and not shadow.done()
        finally:
            may_write.set()
        assert (await shadow).held_tokens == 8
        assert all(Tier.DEVICE in found for found in places(taker, PROMPT))


async def test_an_order_that_times_out_during_a_write_keeps_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its places become free only after the thread that writes to them has ended."""
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        store, host, may_write, is_writing = taker.rig.store, taker.target._host, Event(), Event()
        assert host is not None and store is not None
        write = host.write

        def slow(*of: Any) -> int:
            is_writing.set()
            assert may_write.wait(20.0)
            return write(*of)

        with monkeypatch.context() as patched:
            patched.setattr(host, "write", slow)
            shadow = asyncio.create_task(taker.target.pull(order(PROMPT)))
            assert await asyncio.to_thread(is_writing.wait, 20.0)
            shadow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await shadow
            link = taker.target._way("giver", 1).link
            assert link is not None and not link.closed
            assert store.cache.shadows.open_places
            may_write.set()
        async with asyncio.timeout(20.0):
            while store.cache.shadows.open_places:
                await asyncio.sleep(0.01)
        assert len(store.cache.shadows) == 0
        assert (await taker.target.pull(order(PROMPT))).fetched_blocks == 4


async def test_a_link_rests_before_an_order_and_not_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order slept after its last blocks until its scheduler gave it up, and the blocks were wasted."""
    now_s, slept_s = 0.0, [0.0]

    async def fetch(*of: object) -> SimpleNamespace:
        nonlocal now_s
        now_s += 1.0
        return SimpleNamespace(link_s=1.0)

    async def store(*of: object) -> int:
        return 4

    async def sleep(delay_s: float) -> None:
        nonlocal now_s
        now_s += delay_s
        slept_s.append(delay_s)

    with two() as (_, taker):
        monkeypatch.setattr(taker.target, "_config", TransferConfig(shadow_link_share=0.25))
        monkeypatch.setattr(taker.target, "_clock", lambda: now_s)
        monkeypatch.setattr(taker.target, "_fetch", fetch)
        monkeypatch.setattr(taker.target, "_store", store)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "sleep", sleep)
            short = msgspec.structs.replace(order(PROMPT), valid_for_s=2.0)
            assert (await taker.target.pull(short)).fetched_blocks == 4 and sum(slept_s) == 0.0
            resting = await taker.target.pull(short)
            assert resting.fetched_blocks == 0 and resting.is_cut_short and sum(slept_s) == 0.0
            longer = msgspec.structs.replace(order(PROMPT), valid_for_s=4.0)
            assert (await taker.target.pull(longer)).fetched_blocks == 4 and sum(slept_s) == 3.0


async def test_a_link_does_not_rest_for_its_sources_compute_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request waited for a prefill step, and the link then rested three times as long."""
    with two() as (giver, taker):
        giver.rig.serve([PROMPT])
        monkeypatch.setattr(taker.target, "_config", TransferConfig(batch_blocks=2, shadow_link_share=0.25))
        pulled = asyncio.create_task(taker.target.pull(order(PROMPT[:9])))
        giver.door.begin_long_step()
        await asyncio.sleep(1.0)
        giver.door.end_long_step()
        assert (await pulled).took_s < 0.5
