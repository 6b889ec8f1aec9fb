"""What a creditor refuses, before anything is written."""

import msgspec
import numpy as np
import pytest
import torch

from services.worker.engine.layout import Span
from services.worker.engine.partition import Homes, split
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    WRITE,
    GrantRef,
    Request,
    read_answer,
    request_encoder,
    to_wire,
)
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.buffers import bytes_of
from shared.errors import InvalidMessage, StaleEpoch
from shared.messages.lending import KvTier
from tests.services.worker.conftest import ModelFactory
from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, DEBTOR, GRANT, HOST_GRANT, Lender, lender

HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 5


def request(**changes: object) -> bytes:
    """Five rows of a sequence whose first two blocks are the creditor's."""
    homes = Homes(1)
    homes.place([1, 2], 1, [3, 1])
    part = split([Span(2, ROWS, [1, 2])], homes, BLOCK_TOKENS)[1]
    asked = Request(step=1, layer=0, grants=(GRANT,), part=to_wire(part.spans), q_heads=HEADS)
    return request_encoder.encode(msgspec.structs.replace(asked, **changes))


SIZES = [4 * ROWS * HEADS * DIM, 4 * ROWS * KV_HEADS * DIM, 4 * ROWS * KV_HEADS * DIM]


def offer(owner: Lender, header: bytes, sizes: list[int], kind: str = ATTEND, peer: Peer = DEBTOR) -> None:
    owner.creditor.receivers[kind].admit(peer, header, sizes)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"layer": 2}, SIZES),
        ({"layer": -1}, SIZES),
        ({"part": None}, SIZES),
        ({"q_heads": 3}, SIZES),
        ({"q_heads": -4}, SIZES),
        ({"q_heads": 1 << 20}, SIZES),
        ({}, [*SIZES[:2], SIZES[2] + 4]),
        ({}, SIZES[:2]),
        ({}, []),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, object], sizes: list[int], make_model: ModelFactory
) -> None:
    with lender(make_model("llama"), 6) as owner:
        before = [pool.clone() for pools in owner.engine.pools for pool in pools]
        with pytest.raises(InvalidMessage):
            offer(owner, request(**changes), sizes)
        after = [pool for pools in owner.engine.pools for pool in pools]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_grants_of_others_and_earlier_generations_are_refused(make_model: ModelFactory) -> None:
    with lender(make_model("llama"), 6) as owner:
        for grants in ((GrantRef(9, 1),), (GrantRef(1, 0),), ()):
            with pytest.raises(StaleEpoch):
                offer(owner, request(grants=grants), SIZES)
        with pytest.raises(StaleEpoch):
            offer(owner, request(), SIZES, peer=Peer("somebody-else", 1))


def test_a_fetch_names_blocks_of_its_part(make_model: ModelFactory) -> None:
    with lender(make_model("llama"), 6) as owner:
        named = [np.array(indices, dtype=np.int32).tobytes() for indices in ([2], [-1], [])]
        for indices in (*named, b"odd", bytes(5)):
            header = request(indices=indices)
            with pytest.raises(InvalidMessage):
                offer(owner, header, [], FETCH)
        reception = owner.creditor.receivers[FETCH].admit(
            DEBTOR, request(indices=np.array([1], dtype=np.int32).tobytes()), []
        )
        found = reception.commit().buffers
        assert bytes(found[0]) == bytes(bytes_of(owner.engine.pools[0][0][1]))


def test_a_fetch_may_bring_keys_and_values_of_another_layer(make_model: ModelFactory) -> None:
    with lender(make_model("llama"), 6) as owner:
        one = np.array([0], dtype=np.int32).tobytes()
        header = request(indices=one, layer=1, write_layer=0)
        reception = owner.creditor.receivers[FETCH].admit(DEBTOR, header, SIZES[1:])
        for buffer in reception.buffers:
            buffer[:] = np.ones(buffer.nbytes // 4, dtype=np.float32).tobytes()
        assert len(reception.commit().buffers) == 2
        k_pool, _ = owner.engine.pools[0]
        assert k_pool[3, :, :, 2:].eq(1).all() and k_pool[1, :, :, :3].eq(1).all()
        assert int(k_pool.count_nonzero()) == ROWS * KV_HEADS * DIM
        for write_layer in (-1, 2):
            with pytest.raises(InvalidMessage):
                offer(owner, request(indices=one, write_layer=write_layer), SIZES[1:], FETCH)


def test_a_step_is_described_once_and_forgotten_with_its_debtor(make_model: ModelFactory) -> None:
    with lender(make_model("llama"), 6) as owner:
        writes = SIZES[1:]
        offer(owner, request(q_heads=0), writes, WRITE)
        offer(owner, request(q_heads=0, part=None, layer=1), writes, WRITE)
        owner.creditor.keep({DEBTOR.worker_id, "another"})
        offer(owner, request(part=None), SIZES)
        owner.creditor.keep({"another"})
        with pytest.raises(InvalidMessage, match="never described"):
            offer(owner, request(q_heads=0, part=None), writes, WRITE)


def test_host_memory_is_refused_where_none_is_lent_and_described_by_itself(make_model: ModelFactory) -> None:
    with lender(make_model("llama"), 6) as owner, pytest.raises(InvalidMessage, match="no host memory"):
        offer(owner, request(tier=KvTier.HOST), SIZES)
    with lender(make_model("llama"), 6, host_blocks=4) as owner:
        with pytest.raises(StaleEpoch):
            offer(owner, request(tier=KvTier.HOST), SIZES)
        offer(owner, request(), SIZES)
        with pytest.raises(InvalidMessage, match="never described"):
            offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,), part=None), SIZES)
        offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,)), SIZES)


@pytest.mark.parametrize("attends", [True, False])
def test_host_memory_is_written_and_attended_to_where_that_is_agreed(
    attends: bool, make_model: ModelFactory
) -> None:
    with lender(make_model("llama"), 6, host_blocks=4, host_attends=attends) as owner:
        assert owner.host is not None
        header = request(tier=KvTier.HOST, grants=(HOST_GRANT,))
        reception = owner.creditor.receivers[ATTEND].admit(DEBTOR, header, SIZES)
        for buffer in reception.buffers:
            buffer[:] = np.ones(buffer.nbytes // 4, dtype=np.float32).tobytes()
        reply = reception.commit()
        assert read_answer(reply.header).over_budget is not attends
        assert len(reply.buffers) == (2 if attends else 0)
        assert owner.host.pools[0][0][3, :, :, 2:].eq(1).all(), "written in any case"
        assert not any(bool(pool.any()) for pools in owner.engine.pools for pool in pools)


def test_an_abandoned_question_writes_nothing(make_model: ModelFactory) -> None:
    with lender(make_model("llama"), 6) as owner:
        reception = owner.creditor.receivers[ATTEND].admit(DEBTOR, request(), SIZES)
        for buffer in reception.buffers:
            buffer[:] = b"\x01" * buffer.nbytes
        reception.abandon()
        assert not any(bool(pool.any()) for pools in owner.engine.pools for pool in pools)
