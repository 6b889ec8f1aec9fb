"""A creditor refuses bad requests before any write, and checks each layer against the current grants."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import Span, pack
from services.worker.peers.attention.core.cost import ComputeBudget, ShipMode
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.memory import device_memory
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    NO_STEP,
    WRITE,
    GrantRef,
    Request,
    read_answer,
    request_encoder,
    to_wire,
)
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Peer, PeerLink, Reception, bytes_of
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import CreditorLost, InvalidMessage, StaleEpoch
from shared.messages.lending import KvTier
from shared.messages.sequence import Sampling
from tests.patience import wait_until
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    DEBTOR,
    GRANT,
    HOST_GRANT,
    Lender,
    always,
    connect,
    lender,
    make_engine,
)
from tests.services.worker.peers.lending.builders import borrow, give_back

HEADS, KV_HEADS, DIM, ROWS = 4, 2, 16, 5


def request(**changes: object) -> bytes:
    """Return five rows of a sequence whose first two blocks are at the creditor."""
    homes = Homes(1)
    homes.place([1, 2], 1, [3, 1])
    part = split(pack([Span(2, ROWS, [1, 2])], BLOCK_TOKENS), homes, BLOCK_TOKENS)[1]
    asked = Request(step=1, layer=0, grants=(GRANT,), part=to_wire(part.spans), q_heads=HEADS)
    return request_encoder.encode(msgspec.structs.replace(asked, **changes))


SIZES = [4 * ROWS * HEADS * DIM, 4 * ROWS * KV_HEADS * DIM, 4 * ROWS * KV_HEADS * DIM]


@pytest.fixture
def owner(llama: Any) -> Iterator[Lender]:
    with lender(llama, 6, host_blocks=4) as made:
        yield made


def offer(
    owner: Lender, header: bytes, sizes: list[int], kind: str = ATTEND, peer: Peer = DEBTOR
) -> Reception:
    return owner.creditor.receivers[kind](peer, header, sizes)


def fill(reception: Reception, value: float) -> None:
    for buffer in reception.buffers:
        buffer[:] = bytes_of(torch.full((len(buffer) // 4,), value))


def content(engine: TorchEngine) -> list[torch.Tensor]:
    return [pool.clone() for pools in engine.pools for pool in pools]


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def indices(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


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
def test_what_does_not_fit_is_refused(owner: Lender, changes: dict[str, object], sizes: list[int]) -> None:
    before = content(owner.engine)
    with pytest.raises(InvalidMessage):
        offer(owner, request(**changes), sizes)
    assert is_equal(before, content(owner.engine))


def test_grants_of_others_and_earlier_generations_are_refused(owner: Lender) -> None:
    for grants in ((GrantRef(9, 1),), (GrantRef(1, 0),), ()):
        with pytest.raises(StaleEpoch):
            offer(owner, request(grants=grants), SIZES)
    with pytest.raises(StaleEpoch):
        offer(owner, request(), SIZES, peer=Peer("somebody-else", 1))


def test_a_fetch_names_blocks_of_its_part(owner: Lender) -> None:
    for named in (indices(2), indices(-1), indices(), b"odd", bytes(5)):
        with pytest.raises(InvalidMessage):
            offer(owner, request(indices=named), [], FETCH)
    found = offer(owner, request(indices=indices(1)), [], FETCH).commit().buffers
    assert bytes(found[0]) == bytes(bytes_of(owner.engine.pools[0][0][1]))


def test_a_fetch_may_bring_keys_and_values_of_another_layer(owner: Lender) -> None:
    reception = offer(owner, request(indices=indices(0), layer=1, write_layer=0), SIZES[1:], FETCH)
    fill(reception, 1.0)
    assert len(reception.commit().buffers) == 2
    k_pool, _ = owner.engine.pools[0]
    assert k_pool[3, :, :, 2:].eq(1).all() and k_pool[1, :, :, :3].eq(1).all()
    assert int(k_pool.count_nonzero()) == ROWS * KV_HEADS * DIM
    for write_layer in (-1, 2):
        with pytest.raises(InvalidMessage):
            offer(owner, request(indices=indices(0), write_layer=write_layer), SIZES[1:], FETCH)


def test_a_step_is_described_once_and_forgotten_with_its_debtor(owner: Lender) -> None:
    writes = SIZES[1:]
    offer(owner, request(q_heads=0), writes, WRITE)
    offer(owner, request(q_heads=0, part=None, layer=1), writes, WRITE)
    owner.creditor.keep({DEBTOR.worker_id, "another"})
    offer(owner, request(part=None), SIZES)
    owner.creditor.keep({"another"})
    with pytest.raises(InvalidMessage, match="never described"):
        offer(owner, request(q_heads=0, part=None), writes, WRITE)


def test_a_read_beside_a_step_keeps_its_description(owner: Lender) -> None:
    """Blocks came home during the first layers of a step, and the answer lost its KV."""
    writes = SIZES[1:]
    offer(owner, request(q_heads=0, step=7), writes, WRITE)
    for _ in range(20):
        offer(owner, request(indices=indices(0), step=NO_STEP), [], FETCH).commit()
    offer(owner, request(q_heads=0, part=None, layer=1, step=7), writes, WRITE)
    with pytest.raises(InvalidMessage, match="never described"):
        offer(owner, request(part=None, step=NO_STEP), SIZES)


def test_host_memory_is_refused_when_none_is_lent(llama: Any) -> None:
    with lender(llama, 6) as owner, pytest.raises(InvalidMessage, match="no host memory"):
        offer(owner, request(tier=KvTier.HOST), SIZES)


def test_host_memory_has_descriptions_of_its_own(owner: Lender) -> None:
    with pytest.raises(StaleEpoch):
        offer(owner, request(tier=KvTier.HOST), SIZES)
    offer(owner, request(), SIZES)
    with pytest.raises(InvalidMessage, match="never described"):
        offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,), part=None), SIZES)
    offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,)), SIZES)


@pytest.mark.parametrize("attends", [True, False])
def test_host_memory_is_attended_to_only_where_agreed(attends: bool, llama: Any) -> None:
    with lender(llama, 6, host_blocks=4, host_attends=attends) as owner:
        assert owner.host is not None
        reception = offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,)), SIZES)
        fill(reception, 1.0)
        reply = reception.commit()
        assert read_answer(reply.header).over_budget is not attends
        assert len(reply.buffers) == (2 if attends else 0)
        assert owner.host.pools[0][0][3, :, :, 2:].eq(1).all(), "written in any case"
        assert not any(bool(pool.any()) for pool in content(owner.engine))


def test_an_abandoned_request_writes_nothing(owner: Lender) -> None:
    reception = offer(owner, request(), SIZES)
    fill(reception, 1.0)
    reception.abandon()
    assert not any(bool(pool.any()) for pool in content(owner.engine))


BLOCKS = 8


class CountingGrants(LentGrants):
    """Counts lookups of blocks."""

    lookups = 0

    def loans(self, *asked: Any) -> npt.NDArray[np.int64] | None:
        self.lookups += 1
        return super().loans(*asked)


class World:
    """A creditor that lends blocks to `DEBTOR`, one grant for each group."""

    def __init__(self, model: Any, *grants: Sequence[int]) -> None:
        self.now_s = 0.0
        self.freed: list[Freed] = []
        self.engine = make_engine(model, BLOCKS)
        self.table = RBlockTable("creditor", BLOCKS)
        self.grants = Grants(self.table, 1, Terms(BLOCKS, 4.0, 0.5), threading.RLock())
        self.lent = CountingGrants(self.grants, self.table, self.freed.append, lambda: self.now_s)
        budget = ComputeBudget(1.0)
        self.creditor = Creditor(
            device_memory(self.engine.attention), self.lent, budget, block_tokens=BLOCK_TOKENS
        )
        self.refs: list[GrantRef] = []
        for blocks in grants:
            self.lend(blocks)

    def lend(self, blocks: Sequence[int]) -> None:
        name, life = DEBTOR.worker_id, DEBTOR.incarnation
        asked = borrow(name, incarnation=life, request=len(self.refs) + 1, blocks=len(blocks))
        grant = self.grants.lend(asked, blocks, self.now_s).grant
        assert grant is not None
        self.refs.append(GrantRef(grant.grant_id, grant.generation))

    def give_back(self, grant_id: int, *blocks: int) -> None:
        asked = give_back(DEBTOR.worker_id, grant_id, *blocks, incarnation=DEBTOR.incarnation)
        freed = self.grants.give_back(asked)[1]
        self.freed += [] if freed is None else [freed]

    def ask(
        self, kind: str, layer: int, blocks: Sequence[int], *, step: int = 1, described: bool = True
    ) -> None:
        """Return the part of a row that sees all blocks and writes to the last."""
        homes = Homes(0)
        homes.place(range(len(blocks)), 1, blocks)
        position = len(blocks) * BLOCK_TOKENS - 1
        _, part = split(
            pack([Span(position, 1, list(range(len(blocks))))], BLOCK_TOKENS), homes, BLOCK_TOKENS
        )
        asked = Request(
            step=step,
            layer=layer,
            grants=tuple(self.refs),
            part=to_wire(part.spans) if described else None,
            q_heads=HEADS if kind == ATTEND else 0,
            indices=indices(0) if kind == FETCH else b"",
        )
        _, kv_heads, dim, _ = self.engine.pools[0][0].shape
        sizes = {ATTEND: [4 * HEADS * dim] + [4 * kv_heads * dim] * 2, WRITE: [4 * kv_heads * dim] * 2}
        receiver = self.creditor.receivers[kind]
        reception = receiver(DEBTOR, request_encoder.encode(asked), sizes.get(kind, []))
        fill(reception, 9.0)
        reception.commit()


@pytest.mark.parametrize("kind", [ATTEND, WRITE, FETCH])
@pytest.mark.parametrize("returned", [2, 5])
def test_a_late_layer_does_not_write_to_a_returned_block(kind: str, returned: int, llama: Any) -> None:
    """A layer of an earlier description wrote to a block that belonged to another debtor by then."""
    world = World(llama, [2, 5])
    world.ask(kind, 0, [2, 5])
    world.give_back(1, returned)
    assert [part.blocks for part in world.freed] == [(returned,)]
    before = content(world.engine)
    with pytest.raises(StaleEpoch, match="borrow again"):
        world.ask(kind, 1, [2, 5], described=False)
    assert is_equal(before, content(world.engine))
    world.grants.check_integrity()


def test_a_refused_layer_leaves_the_grant(llama: Any) -> None:
    world = World(llama, [2, 5])
    world.ask(WRITE, 0, [2, 5])
    world.give_back(1, 5)
    with pytest.raises(StaleEpoch):
        world.ask(WRITE, 1, [2, 5], described=False)
    world.give_back(1, 2)
    assert [part.blocks for part in world.freed] == [(5,), (2,)]


def test_blocks_are_looked_up_once_until_a_grant_changes(llama: Any) -> None:
    world = World(llama, [2, 5, 6])
    for layer in (0, 1, 0, 1):
        world.ask(WRITE, layer, [2, 5], described=layer == 0 and not world.lent.lookups)
    assert world.lent.lookups == 1
    world.give_back(1, 6)
    for layer in (0, 1):
        world.ask(WRITE, layer, [2, 5], described=False)
    assert world.lent.lookups == 2


def test_a_lease_that_runs_out_in_the_middle_of_a_step_ends_it(llama: Any) -> None:
    world = World(llama, [2, 5])
    world.ask(WRITE, 0, [2, 5])
    world.now_s = 4.6
    with pytest.raises(StaleEpoch):
        world.ask(WRITE, 1, [2, 5], described=False)


@pytest.mark.parametrize("seed", range(20))
def test_only_blocks_lent_now_are_written(seed: int, llama: Any) -> None:
    """Grants, returns, ended leases, and layers of the last steps, in any order."""
    dice = random.Random(seed)
    world = World(llama)
    free, held = list(range(BLOCKS)), dict[int, list[int]]()
    steps: dict[int, list[int]] = {}
    number = 0
    for _ in range(60):
        event = dice.choice(["lend", "return", "step", "layer", "layer", "wait"])
        if event == "lend" and free:
            blocks = [free.pop() for _ in range(min(len(free), dice.randint(1, 3)))]
            world.lend(blocks)
            held[world.refs[-1].grant_id] = blocks
        elif event == "return" and held:
            grant_id = dice.choice(list(held))
            back = dice.sample(held[grant_id], dice.randint(1, len(held[grant_id])))
            world.give_back(grant_id, *back)
            held[grant_id] = [block for block in held[grant_id] if block not in back]
            free += back
        elif event == "wait" and dice.random() < 0.2:
            world.now_s += 4.6
            world.grants.tick(world.now_s)
            free, held = list(range(BLOCKS)), {}
        held = {grant_id: blocks for grant_id, blocks in held.items() if blocks}
        world.refs = [ref for ref in world.refs if ref.grant_id in held]
        lent = [block for blocks in held.values() for block in blocks]
        if event == "step" and lent:
            number += 1
            steps[number] = dice.sample(lent, dice.randint(1, len(lent)))
            world.ask(WRITE, 0, steps[number], step=number)
        elif event == "layer" and steps:
            step = dice.choice(list(steps)[-4:])
            before = content(world.engine)
            if set(steps[step]) <= set(lent) and world.refs:
                world.ask(WRITE, 1, steps[step], step=step, described=False)
                before = content(world.engine)
            else:
                with pytest.raises(StaleEpoch):
                    world.ask(WRITE, 1, steps[step], step=step, described=False)
            assert is_equal(before, content(world.engine))
        world.grants.check_integrity()
        world.table.check_integrity()


@contextmanager
def listening(world: World) -> Iterator[PeerLink]:
    desk = WorkerDesk(Peer("creditor", 1))
    for kind, receiver in world.creditor.receivers.items():
        desk.serve(kind, receiver)
    listener = TcpTransport().listen(desk)
    try:
        ticket = desk.issue(DEBTOR, valid_for_s=5.0)
        yield TcpTransport().dial(listener.address, DEBTOR, desk.own, ticket, deadline_s=5.0)
    finally:
        assert listener.close(5.0)


@pytest.mark.parametrize("mode", [ShipMode.SHIP, ShipMode.FETCH])
def test_a_debtor_continues_while_it_returns_but_not_on_returned_blocks(
    mode: ShipMode, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns blocks between two layers of a step, over a real link."""
    prompt = [5, 9, 2, 7, 11, 3, 8, 6, 4, 12]
    point = SamplePoint(Sampling(seed=0, max_tokens=32, temperature=0.0), 0, 0, prompt)
    expected = make_engine(llama, 3).step([Row(prompt, 0, [0, 1, 2], point)])
    world = World(llama, [2, 5, 6])
    with listening(world) as link:
        small = make_engine(llama, 1)
        debtor = connect(small, [], 0, choose=always(mode))
        holder = debtor.add(link, [GrantRef(1, 1)])
        debtor.homes.place([1, 2, 3], holder, [2, 5, 6])
        send, returns = debtor.send, [6]

        def return_one(layer: int, *given: Any) -> None:
            if layer == 1 and returns:
                world.give_back(1, returns.pop())
            send(layer, *given)

        monkeypatch.setattr(debtor, "send", return_one)
        row = Row(prompt, 0, [0, 1, 2], point)
        assert small.step([row]) == expected
        wait_until(lambda: world.freed)
        assert world.freed[0].blocks == (6,)
        returns.append(5)
        with pytest.raises(CreditorLost, match="borrow again"):
            small.step([row])
            if (
                mode is ShipMode.SHIP
            ):  # Natively a step keeps its blocks to the end, and the next has not got them.
                wait_until(lambda: len(world.freed) == 2)
                small.step([row])
        assert world.table.lent_row(KvTier.DEVICE, 5) is None
        debtor.close()
