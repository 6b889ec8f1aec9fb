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
from services.worker.peers.settings import TransferConfig
from shared.blocks import chain, root
from shared.errors import KvasirError
from shared.messages.sequence import pack_tokens
from tests.services.worker.peers.migration.rig import PROMPT, Side, order, workers
from tests.services.worker.prefix_rig import BLOCK_TOKENS

QUICK = TransferConfig(batch_blocks=2, shadow_link_share=1.0)


SHADOW = order(is_shadow=True)
EARLY = order(PROMPT[:9], is_shadow=True)


@contextmanager
def two(host_blocks: int = 16, share: float = 0.5) -> Iterator[tuple[Side, Side]]:
    cached = PrefixCacheConfig(shadow_share=share)
    with workers(config=QUICK, cached=cached, host_blocks=host_blocks) as (giver, taker):
        giver.rig.serve([PROMPT])
        yield giver, taker


def places(side: Side) -> list[set[Tier]]:
    """Return the tiers of each stored block of the prompt."""
    names = chain(root(side.store.fingerprint), pack_tokens(PROMPT), BLOCK_TOKENS)
    found = side.store.cache._books.tree.match(names)
    return [{tier for tier in Tier if node.places[tier] is not None} for node in found]


async def test_a_shadow_is_on_the_host_and_saves_its_computation() -> None:
    with two() as (giver, taker):
        answer = giver.rig.serve([PROMPT])
        store = taker.store
        free = store.cache.free_blocks
        pulled = await taker.target.pull(SHADOW)
        assert (pulled.held_tokens, pulled.fetched_blocks) == (16, 4)
        assert places(taker) == [{Tier.HOST}] * 4 and store.cache.free_blocks == free
        assert len(store.cache.shadows) == 4
        for side in (giver, taker):
            assert side.store.transfers.figures[Route.SHADOW].copies > 0
            assert side.store.transfers.figures[Route.PULL].copies == 0
        before = taker.rig.prefilled_tokens
        assert taker.rig.serve([PROMPT]) == answer
        assert taker.rig.prefilled_tokens - before == len(PROMPT) - 16
        assert store.cache.counts["shadows_used"] == 4 and len(store.cache.shadows) == 0


async def test_shadows_follow_a_running_sequence() -> None:
    with two() as (_, taker):
        assert (await taker.target.pull(EARLY)).fetched_blocks == 2
        assert (await taker.target.pull(SHADOW)).fetched_blocks == 2
        again = await taker.target.pull(SHADOW)
        assert (again.held_tokens, again.fetched_blocks) == (16, 0)


async def test_shadows_stay_within_their_share() -> None:
    with two(host_blocks=6, share=0.5) as (_, taker):
        assert (await taker.target.pull(SHADOW)).held_tokens == 12
        assert (await taker.target.pull(SHADOW)).fetched_blocks == 0


@pytest.mark.parametrize("host_blocks", [0, 4])
async def test_a_worker_without_shadows_reports_none(host_blocks: int) -> None:
    with two(host_blocks=host_blocks, share=0.0) as (_, taker):
        assert (await taker.target.pull(SHADOW)).held_tokens == 0
        assert taker.rig.core.report(0.0).shadow_room_blocks == 0


async def test_a_source_that_dies_leaves_whole_blocks_or_none() -> None:
    with two() as (giver, taker):
        await taker.target.pull(EARLY)
        giver.plane.close()
        taker.target.forget("giver")
        with pytest.raises(KvasirError):
            await taker.target.pull(SHADOW)
        assert len(places(taker)) == 2


async def test_a_move_takes_shadows_to_the_device() -> None:
    with two() as (_, taker):
        await taker.target.pull(SHADOW)
        moved = await taker.target.pull(order())
        assert moved.held_tokens == 16
        assert all(Tier.DEVICE in found for found in places(taker))
        assert len(taker.store.cache.shadows) == 0


async def test_a_shadow_behind_a_move_does_not_mark_the_link_as_failed() -> None:
    """A shadow that timed out behind a move marked the healthy link as failed for a minute."""
    with two() as (_, taker):
        moving = taker.target._way("giver", 1)
        async with moving.lock:
            waited = await taker.target.pull(msgspec.structs.replace(SHADOW, valid_for_s=0.1))
        assert waited.held_tokens == 0 and taker.target.bytes_per_s("giver") != 0.0
        assert (await taker.target.pull(SHADOW)).held_tokens == 16


async def test_a_failed_shadow_does_not_mark_the_link_as_failed() -> None:
    """Shadows yield to all other copies at their source, so moves may work when a shadow fails."""
    with two() as (giver, taker):
        giver.store.transfers.figures[Route.SHADOW].open = 64
        with pytest.raises(KvasirError):
            await taker.target.pull(SHADOW)
        assert taker.target.bytes_per_s("giver") != 0.0
        moved = await taker.target.pull(order())
        assert moved.held_tokens == 16


def slow_writes(side: Side, patched: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Make writes to the host wait. Return the event to let them go on, and that of their begin."""
    host, may_write, is_writing = side.target._host, Event(), Event()
    write = host.write

    def slow(*of: Any) -> int:
        is_writing.set()
        assert may_write.wait(20.0)
        return write(*of)

    patched.setattr(host, "write", slow)
    return may_write, is_writing


async def test_a_move_does_not_wait_for_a_shadows_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow kept the link while it was written behind the disk's writes, for up to 5 s."""
    with two() as (_, taker):
        may_write, is_writing = slow_writes(taker, monkeypatch)
        shadow = asyncio.create_task(taker.target.pull(EARLY))
        try:
            assert await asyncio.to_thread(is_writing.wait, 20.0)
            moved = await asyncio.wait_for(taker.target.pull(order()), 10.0)
            assert moved.held_tokens == 16 and not shadow.done()
        finally:
            may_write.set()
        assert (await shadow).held_tokens == 8
        assert all(Tier.DEVICE in found for found in places(taker))


async def test_an_order_that_times_out_during_a_write_keeps_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its places become free only after the thread that writes to them has ended."""
    with two() as (_, taker):
        shadows = taker.store.cache.shadows
        with monkeypatch.context() as patched:
            may_write, is_writing = slow_writes(taker, patched)
            shadow = asyncio.create_task(taker.target.pull(SHADOW))
            assert await asyncio.to_thread(is_writing.wait, 20.0)
            shadow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await shadow
            link = taker.target._way("giver", 1).link
            assert link is not None and not link.closed
            assert shadows.open_places
            may_write.set()
        async with asyncio.timeout(20.0):
            while shadows.open_places:
                await asyncio.sleep(0.01)
        assert len(shadows) == 0
        assert (await taker.target.pull(SHADOW)).fetched_blocks == 4


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
            short = msgspec.structs.replace(SHADOW, valid_for_s=2.0)
            assert (await taker.target.pull(short)).fetched_blocks == 4 and sum(slept_s) == 0.0
            resting = await taker.target.pull(short)
            assert resting.fetched_blocks == 0 and resting.is_cut_short and sum(slept_s) == 0.0
            longer = msgspec.structs.replace(SHADOW, valid_for_s=4.0)
            assert (await taker.target.pull(longer)).fetched_blocks == 4 and sum(slept_s) == 3.0


async def test_a_link_does_not_rest_for_its_sources_compute_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request waited for a prefill step, and the link then rested three times as long."""
    with two() as (giver, taker):
        monkeypatch.setattr(taker.target, "_config", TransferConfig(batch_blocks=2, shadow_link_share=0.25))
        pulled = asyncio.create_task(taker.target.pull(EARLY))
        giver.door.begin_long_step()
        await asyncio.sleep(1.0)
        giver.door.end_long_step()
        assert (await pulled).took_s < 0.5
