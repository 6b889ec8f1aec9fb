"""Lent blocks are touched under what holds now: each layer is checked, whatever was described before.

A creditor with the lending table of a worker, asked over real links, or by its receivers alone.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.engine import Row
from services.worker.engine.layout import Span
from services.worker.engine.partition import Homes, split
from services.worker.peers.attention.core.cost import ComputeBudget, ShipMode
from services.worker.peers.attention.creditor import Creditor
from services.worker.peers.attention.lent import LentGrants, SharedGrants
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    WRITE,
    GrantRef,
    Request,
    request_encoder,
    to_wire,
)
from services.worker.peers.lending.core.grants import Freed, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.buffers import bytes_of
from services.worker.peers.transport.tcp import TcpTransport
from services.worker.peers.transport.tickets import WorkerDesk
from shared.errors import CreditorLost, StaleEpoch
from shared.messages.lending import BorrowBlocks, KvTier, ReturnBlocks
from shared.messages.sequence import Sampling
from tests.services.worker.conftest import ModelFactory
from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, DEBTOR, always, connect, make_engine

BLOCKS = 8
HEADS = 4


class CountingGrants(LentGrants):
    """Counts how often blocks are looked up."""

    lookups = 0

    def covers(self, *asked: Any) -> bool:
        self.lookups += 1
        return super().covers(*asked)


class World:
    """A creditor that has lent some of its blocks to `DEBTOR`, a grant for each sequence of them."""

    def __init__(self, model: Any, *grants: Sequence[int]) -> None:
        self.now_s = 0.0
        self.freed: list[Freed] = []
        self.engine = make_engine(model, BLOCKS)
        self.table = RBlockTable("creditor", BLOCKS)
        self.grants = SharedGrants(self.table, 1, Terms(BLOCKS, 4.0, 0.5))
        self.lent = CountingGrants(self.grants, self.table, self.freed.append, lambda: self.now_s)
        budget = ComputeBudget(1.0)
        self.creditor = Creditor(self.engine.attention, self.lent, budget, block_tokens=BLOCK_TOKENS)
        self.refs: list[GrantRef] = []
        for blocks in grants:
            self.lend(blocks)

    def lend(self, blocks: Sequence[int]) -> None:
        asked = BorrowBlocks(
            debtor_id=DEBTOR.worker_id,
            debtor_incarnation=DEBTOR.incarnation,
            request=len(self.refs) + 1,
            blocks=len(blocks),
        )
        grant = self.grants.lend(asked, blocks, self.now_s).grant
        assert grant is not None
        self.refs.append(GrantRef(grant.grant_id, grant.generation))

    def give_back(self, grant_id: int, *blocks: int) -> None:
        asked = ReturnBlocks(
            debtor_id=DEBTOR.worker_id,
            debtor_incarnation=DEBTOR.incarnation,
            creditor_incarnation=1,
            grant_id=grant_id,
            blocks=blocks,
        )
        freed = self.grants.give_back(asked)[1]
        self.freed += [] if freed is None else [freed]

    def ask(
        self, kind: str, layer: int, blocks: Sequence[int], *, step: int = 1, described: bool = True
    ) -> None:
        """Of a row whose KV goes to the last of the blocks, and that sees all of them."""
        homes = Homes(0)
        homes.place(range(len(blocks)), 1, blocks)
        position = len(blocks) * BLOCK_TOKENS - 1
        _, part = split([Span(position, 1, list(range(len(blocks))))], homes, BLOCK_TOKENS)
        asked = Request(
            step=step,
            layer=layer,
            grants=tuple(self.refs),
            part=to_wire(part.spans) if described else None,
            q_heads=HEADS if kind == ATTEND else 0,
            indices=np.zeros(1, dtype=np.int32).tobytes() if kind == FETCH else b"",
        )
        _, kv_heads, dim, _ = self.engine.pools[0][0].shape
        sizes = {ATTEND: [4 * HEADS * dim] + [4 * kv_heads * dim] * 2, WRITE: [4 * kv_heads * dim] * 2}
        reception = self.creditor.receivers[kind].admit(
            DEBTOR, request_encoder.encode(asked), sizes.get(kind, [])
        )
        for buffer in reception.buffers:
            buffer[:] = bytes_of(torch.full((len(buffer) // 4,), 9.0))
        reception.commit()

    def content(self) -> list[torch.Tensor]:
        return [pool.clone() for pools in self.engine.pools for pool in pools]


@pytest.mark.parametrize("kind", [ATTEND, WRITE, FETCH])
@pytest.mark.parametrize("returned", [2, 5])
def test_a_late_layer_touches_no_block_that_is_back(
    kind: str, returned: int, make_model: ModelFactory
) -> None:
    """It named a step that was described while the block was lent, and wrote to it when it was another's."""
    world = World(make_model("llama"), [2, 5])
    world.ask(kind, 0, [2, 5])
    world.give_back(1, returned)
    assert [part.blocks for part in world.freed] == [(returned,)]
    before = world.content()
    with pytest.raises(StaleEpoch, match="borrow anew"):
        world.ask(kind, 1, [2, 5], described=False)
    assert all(torch.equal(one, other) for one, other in zip(before, world.content(), strict=True))
    world.grants.check_integrity()


def test_a_refused_layer_leaves_nobody_inside(make_model: ModelFactory) -> None:
    world = World(make_model("llama"), [2, 5])
    world.ask(WRITE, 0, [2, 5])
    world.give_back(1, 5)
    with pytest.raises(StaleEpoch):
        world.ask(WRITE, 1, [2, 5], described=False)
    world.give_back(1, 2)
    assert [part.blocks for part in world.freed] == [(5,), (2,)]


def test_a_return_costs_the_other_blocks_of_the_step_nothing(make_model: ModelFactory) -> None:
    """A debtor goes on with what it has while others of the grant are on their way back."""
    world = World(make_model("llama"), [2, 5, 6], [1])
    world.ask(WRITE, 0, [2, 1, 5])
    world.give_back(1, 6)
    world.ask(WRITE, 1, [2, 1, 5], described=False)
    assert world.engine.pools[1][0][5].any()


def test_blocks_are_looked_up_once_until_a_grant_changes(make_model: ModelFactory) -> None:
    world = World(make_model("llama"), [2, 5, 6])
    for layer in (0, 1, 0, 1):
        world.ask(WRITE, layer, [2, 5], described=layer == 0 and not world.lent.lookups)
    assert world.lent.lookups == 1
    world.give_back(1, 6)
    for layer in (0, 1):
        world.ask(WRITE, layer, [2, 5], described=False)
    assert world.lent.lookups == 2


def test_a_lease_that_runs_out_in_the_middle_of_a_step_ends_it(make_model: ModelFactory) -> None:
    world = World(make_model("llama"), [2, 5])
    world.ask(WRITE, 0, [2, 5])
    world.now_s = 4.6
    with pytest.raises(StaleEpoch):
        world.ask(WRITE, 1, [2, 5], described=False)


@pytest.mark.parametrize("seed", range(20))
def test_only_what_is_lent_now_is_ever_written(seed: int, make_model: ModelFactory) -> None:
    """Grants, returns, ends of leases, and layers of the last steps, in any order."""
    dice = random.Random(seed)
    world = World(make_model("llama"))
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
            before = world.content()
            if set(steps[step]) <= set(lent) and world.refs:
                world.ask(WRITE, 1, steps[step], step=step, described=False)
                before = world.content()
            else:
                with pytest.raises(StaleEpoch):
                    world.ask(WRITE, 1, steps[step], step=step, described=False)
            assert all(torch.equal(one, other) for one, other in zip(before, world.content(), strict=True))
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
def test_a_debtor_goes_on_while_it_returns_and_is_stopped_at_what_it_returned(
    mode: ShipMode, make_model: ModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real link: a return between two layers of its step."""
    model = make_model("llama")
    prompt = [5, 9, 2, 7, 11, 3, 8, 6, 4, 12]
    point = SamplePoint(Sampling(seed=0, max_tokens=32, temperature=0.0), 0, 0, prompt)
    expected = make_engine(model, 3).step([Row(prompt, 0, [0, 1, 2], point)])
    world = World(model, [2, 5, 6])
    with listening(world) as link:
        small = make_engine(model, 1)
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
        assert small.step([row]) == expected and world.freed[0].blocks == (6,)
        returns.append(5)
        with pytest.raises(CreditorLost, match="borrow anew"):
            small.step([row])
        assert world.table.lent_row(KvTier.DEVICE, 5) is None
        debtor.close()
