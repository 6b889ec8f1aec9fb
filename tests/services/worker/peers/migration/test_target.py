"""Blocks fetched from another worker: found like own ones, the same answer, no partial blocks."""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.worker.kv.tiers.records import CRC, Checksums, RecordRow
from services.worker.peers.settings import TransferConfig
from shared.errors import DeadlineExceeded, KvasirError, ModelMismatch
from tests.services.worker.peers.migration.rig import PROMPT, order, workers
from tests.services.worker.prefix_rig import DEVICE_BLOCKS


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
