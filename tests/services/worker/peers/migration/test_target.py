"""Blocks fetched from another worker, and copies of a running sequence: whole, found, the same answer."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.core.settings import PrefixCacheConfig, TransferConfig
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.tiers.records import CRC, Checksums, RecordRow
from services.worker.kv.transfers import Route
from services.worker.service import Worker
from shared import subjects
from shared.blocks import chain, root
from shared.bus import Listener
from shared.errors import DeadlineExceeded, KvasirError, ModelMismatch
from shared.messages.moves import BlocksPulled
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import pack_tokens
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.worker.peers.migration.rig import PROMPT, Side, order, workers
from tests.services.worker.prefix_rig import BLOCK_TOKENS, DEVICE_BLOCKS
from tests.shared.messages.builders import plan, prefill, ref, spec


async def test_fetched_blocks_are_reused_with_the_same_answer() -> None:
    with workers() as (giver, taker):
        answer = giver.rig.serve([PROMPT])
        pulled = await taker.target.pull(order())
        assert (pulled.held_tokens, pulled.fetched_blocks) == (16, 4)
        assert pulled.fetched_bytes == 4 * taker.store.record_bytes
        before = taker.rig.prefilled_tokens
        assert taker.rig.serve([PROMPT]) == answer
        assert taker.rig.prefilled_tokens - before == len(PROMPT) - 16
        assert (taker.target.bytes_per_s("giver") or 0) > 0


async def test_a_repeated_fetch_is_free_and_a_longer_one_adds_blocks() -> None:
    with workers() as (giver, taker):
        giver.rig.serve([PROMPT])
        assert (await taker.target.pull(order(PROMPT[:9]))).held_tokens == 8
        assert (await taker.target.pull(order([*PROMPT, *PROMPT]))).fetched_blocks == 2, "what is there"
        assert (await taker.target.pull(order())).fetched_blocks == 0


async def test_blocks_of_two_sources_are_written_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records reach a GPU by one buffer: two threads wrote each other's bytes into verified blocks."""
    with workers("one", "other", "taker", config=TransferConfig(batch_blocks=2)) as (one, other, taker):
        answers = [giver.rig.serve([prompt]) for giver, prompt in ((one, PROMPT), (other, PROMPT[::-1]))]
        both, write = threading.Barrier(2), taker.target._device.records.write
        met: list[int] = []

        def meet(rows: Sequence[RecordRow], blocks: Sequence[int]) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                met.append(both.wait(0.2))
            write(rows, blocks)

        monkeypatch.setattr(taker.target._device.records, "write", meet)
        orders = order(PROMPT, source="one"), order(PROMPT[::-1], source="other")
        pulled = await asyncio.gather(*map(taker.target.pull, orders))
        assert [each.fetched_blocks for each in pulled] == [4, 4] and not met
        assert [taker.rig.serve([prompt]) for prompt in (PROMPT, PROMPT[::-1])] == answers


async def test_a_corrupted_block_is_refused_and_those_before_it_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers() as (giver, taker):
        giver.rig.serve([PROMPT])
        verified = 0

        def wrong_from_the_third_on(row: RecordRow) -> int:
            nonlocal verified
            verified += 1
            return CRC.digest(row) ^ (verified > 2)

        monkeypatch.setattr(taker.target, "_sums", Checksums(CRC.kind, wrong_from_the_third_on))
        pulled = await taker.target.pull(order())
        assert pulled.held_tokens == 8 and taker.target.refused_blocks == 2


async def test_a_lack_of_room_is_not_an_error() -> None:
    with workers() as (giver, taker):
        giver.rig.serve([PROMPT])
        cache = taker.store.cache
        taken = cache.allocate(cache.free_blocks - 1)
        assert (await taker.target.pull(order())).held_tokens == 0
        cache.release(taken)


async def test_a_source_that_died_or_restarted_fails_the_fetch() -> None:
    with workers() as (giver, taker):
        giver.rig.serve([PROMPT])
        with pytest.raises(KvasirError):
            await taker.target.pull(order(PROMPT, incarnation=2))
        assert taker.target.bytes_per_s("giver") == 0.0, "the link failed lately"
        assert (await taker.target.pull(order(PROMPT[:9]))).held_tokens == 8
        giver.plane.close()
        with pytest.raises(KvasirError):
            await taker.target.pull(order())


async def test_another_model_gives_nothing() -> None:
    with workers() as (giver, taker):
        giver.source.fingerprint = b"x" * 16
        with pytest.raises(ModelMismatch):
            await taker.target.pull(order())


async def test_a_throttled_link_has_and_reports_its_limit() -> None:
    with workers(config=TransferConfig(batch_blocks=2, link_bytes_per_s=200_000.0)) as (giver, taker):
        assert taker.target.bytes_per_s("giver") is None
        giver.rig.serve([PROMPT])
        pulled = await taker.target.pull(order())
        assert pulled.took_s >= pulled.fetched_bytes / 200_000
        assert 0 < (taker.target.bytes_per_s("giver") or 0) < 200_000
        taker.target.forget_idle(1e6)
        assert list(taker.target.rates()) == ["giver"]
        taker.target.forget_idle(-1.0)
        assert taker.target.rates() == {} and taker.target.bytes_per_s("giver") is None


@pytest.mark.parametrize("before", ["the bytes are asked for", "the bytes are stored"])
async def test_a_fetch_cancelled_during_a_long_step_leaks_no_block(
    before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline must not cancel the call that returns blocks, nor lose blocks that are arriving."""
    with workers(config=TransferConfig(batch_blocks=2, answer_s=0.2)) as (giver, taker):
        giver.rig.serve([PROMPT])
        cache = taker.store.cache
        write = taker.target._device.records.write

        def arrive(rows: Sequence[RecordRow], blocks: Sequence[int]) -> None:
            write(rows, blocks)
            taker.door.begin_long_step()

        if before == "the bytes are stored":
            monkeypatch.setattr(taker.target._device.records, "write", arrive)
        else:
            make_room = taker.target._device.make_room

            async def make(*of: Any) -> list[int]:
                taker.door.begin_long_step()
                return await make_room(*of)

            monkeypatch.setattr(taker.target._device, "make_room", make)
        with pytest.raises(DeadlineExceeded):
            await taker.target.pull(msgspec.structs.replace(order(), valid_for_s=0.1))
        taker.integrity()
        assert cache.free_blocks + cache.evictable_blocks == DEVICE_BLOCKS


async def test_a_source_in_a_long_step_holds_nothing_for_a_cancelled_fetch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.worker.peers.migration.source._HOLD_S", 0.1)
    with workers() as (giver, taker):
        giver.rig.serve([PROMPT])
        cache = giver.store.cache
        stored = cache.evictable_blocks
        giver.door.begin_long_step()
        with pytest.raises(DeadlineExceeded):
            await taker.target.pull(order())
        giver.integrity()
        assert cache.evictable_blocks == stored > 0


TOKENS = list(range(2, 50))
NAMED = ("worker-0", "worker-1")


async def test_blocks_are_fetched_over_the_bus_and_the_link_is_measured(
    connect_bus: ConnectBus, model_folder: Path
) -> None:
    scheduler, gateway = await connect_bus("scheduler", "scheduler-0"), await connect_bus("gateway", "g")
    reports: dict[str, WorkerReported] = {}
    heard = SimpleNamespace(on_reported=lambda report: reports.update({report.worker_id: report}))
    await scheduler.attach([Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported")], heard)
    serving = []
    for name in NAMED:
        config = WorkerConfig(model=str(model_folder), kv_blocks=64, block_tokens=4, heartbeat_s=0.05)
        bus = await connect_bus("worker", name)
        serving.append(asyncio.create_task(Worker(bus, config, make_engine(config)).serve()))
    await until(lambda: all(name in reports and reports[name].kv_block_bytes for name in NAMED))
    assert not reports["worker-1"].link_bytes_per_s, "peers are dialled on demand"
    asked = spec(ref("req"), TOKENS, max_tokens=1, gateway_id="g")
    await gateway.publish(subjects.gateway_reported("g"), GatewayReported(gateway_id="g", incarnation=1))
    whole = plan(
        1, valid_for_s=30.0, starts=(asked,), prefills=(prefill(asked.ref, 0, len(TOKENS), blocks=13),)
    )
    await scheduler.publish(subjects.worker_plan("worker-0"), whole)
    pull = order(TOKENS, source="worker-0", incarnation=reports["worker-0"].incarnation)
    pulled = BlocksPulled(held_tokens=0)
    async with asyncio.timeout(30.0):
        while pulled.held_tokens < len(TOKENS):
            subject = subjects.worker_pull("worker-1")
            pulled = await scheduler.request(subject, pull, BlocksPulled, deadline_s=10.0)
            await asyncio.sleep(0.02)
    assert pulled.fetched_blocks == 12
    await until(lambda: set(reports["worker-1"].link_bytes_per_s) == {"worker-0"})
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


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


async def test_shadows_follow_a_running_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first, the device's memory for all that may come is had ready."""
    made: list[int] = []
    with two() as (_, taker):
        monkeypatch.setattr(taker.target._device.records, "make_ready", made.append)
        assert (await taker.target.pull(EARLY)).fetched_blocks == 2
        assert (await taker.target.pull(SHADOW)).fetched_blocks == 2
        assert made == [8]  # half of the host's 16
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
