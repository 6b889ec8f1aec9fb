"""Blocks fetched from another worker: found like one's own, the same answer, nothing half-done."""

import pytest

from services.worker.kv.tiers.checksum import checksum
from services.worker.kv.tiers.records import Row
from services.worker.transfer.settings import TransferConfig
from shared.errors import KvasirError, ModelMismatch
from shared.messages.moves import PullBlocks
from shared.messages.sequence import pack_tokens
from tests.services.worker.transfer.rig import pair

PROMPT = [3, 5, 7, 9, 11, 2, 4, 6, 8, 10, 12, 14, 16, 18, 1, 2, 3, 4, 5]


def order(tokens: list[int], incarnation: int = 1) -> PullBlocks:
    return PullBlocks(source="giver", source_incarnation=incarnation, tokens=pack_tokens(tokens))


async def test_what_was_fetched_is_not_computed_again_and_answers_the_same() -> None:
    with pair() as (giver, taker):
        answer = giver.rig.serve([PROMPT])
        pulled = await taker.target.pull(order(PROMPT))
        assert (pulled.held_tokens, pulled.fetched_blocks) == (16, 4)
        assert pulled.fetched_bytes == 4 * taker.rig.store.record_bytes  # type: ignore[union-attr]
        before = taker.rig.prefilled_tokens
        assert taker.rig.serve([PROMPT]) == answer
        assert taker.rig.prefilled_tokens - before == len(PROMPT) - 16
        assert taker.target.rates.bytes_per_s()["giver"] > 0
        for side in (giver, taker):
            side.integrity()


async def test_again_costs_nothing_and_more_is_added() -> None:
    with pair() as (giver, taker):
        giver.rig.serve([PROMPT])
        assert (await taker.target.pull(order(PROMPT[:9]))).held_tokens == 8
        assert (await taker.target.pull(order(PROMPT))).fetched_blocks == 2
        assert (await taker.target.pull(order(PROMPT))).fetched_blocks == 0


async def test_what_the_source_lacks_is_left_to_compute() -> None:
    with pair() as (giver, taker):
        giver.rig.serve([PROMPT[:9]])
        pulled = await taker.target.pull(order(PROMPT))
        assert pulled.held_tokens == 8
        taker.integrity()


async def test_a_corrupted_block_is_refused_and_those_before_it_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (giver, taker):
        giver.rig.serve([PROMPT])
        verified = 0

        def wrong_from_the_third_on(row: Row, name: bytes, fingerprint: bytes) -> int:
            nonlocal verified
            verified += 1
            return checksum(row, name, fingerprint) ^ (verified > 2)

        monkeypatch.setattr("services.worker.transfer.target.checksum", wrong_from_the_third_on)
        pulled = await taker.target.pull(order(PROMPT))
        assert pulled.held_tokens == 8 and taker.target.refused_blocks == 2
        taker.integrity()


async def test_no_room_is_no_error() -> None:
    with pair() as (giver, taker):
        giver.rig.serve([PROMPT])
        cache = taker.rig.store.cache  # type: ignore[union-attr]
        taken = cache.allocate(cache.free_blocks - 1)
        assert (await taker.target.pull(order(PROMPT))).held_tokens == 0
        cache.release(taken)
        taker.integrity()


async def test_a_source_that_died_or_was_started_anew() -> None:
    with pair() as (giver, taker):
        giver.rig.serve([PROMPT])
        with pytest.raises(KvasirError):
            await taker.target.pull(order(PROMPT, incarnation=2))
        assert (await taker.target.pull(order(PROMPT[:9]))).held_tokens == 8
        giver.plane.close()
        with pytest.raises(KvasirError):
            await taker.target.pull(order(PROMPT))
        taker.integrity()


async def test_another_model_gives_nothing() -> None:
    with pair() as (giver, taker):
        giver.source.fingerprint = b"x" * 16
        with pytest.raises(ModelMismatch):
            await taker.target.pull(order(PROMPT))
        taker.integrity()


async def test_a_throttled_link_is_as_slow_as_it_is_told_and_is_measured_so() -> None:
    with pair(TransferConfig(batch_blocks=2, link_bytes_per_s=200_000.0, probe_bytes=20_000)) as (_, taker):
        await taker.target.probe("giver", 1)
        assert 20_000 < taker.target.rates.bytes_per_s()["giver"] <= 200_000
        taker.target.forget("giver")
        assert not taker.target.rates.knows("giver")
