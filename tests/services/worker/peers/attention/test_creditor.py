"""A creditor refuses bad requests before any write, and checks each layer against the current grants."""

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import PackedSpans, Span, pack
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    NO_STEP,
    WRITE,
    GrantRef,
    PartWire,
    Request,
    from_wire,
    request_encoder,
    to_wire,
)
from services.worker.peers.lending.core.debts import Debts
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.service import loans
from services.worker.peers.transport.base import Peer, Reception, bytes_of
from shared.errors import CreditorLost, InvalidMessage, StaleEpoch
from shared.messages.lending import KvTier
from shared.messages.sequence import Sampling
from tests.patience import wait_until
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    DEBTOR,
    DIM,
    GRANT,
    HEADS,
    HOST_GRANT,
    KV_HEADS,
    Book,
    Lender,
    always,
    connect,
    content,
    is_equal,
    lender,
    make_engine,
)
from tests.services.worker.peers.lending.builders import borrow, give_back, renew

ROWS = 5


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


def indices(*numbers: int) -> bytes:
    return np.array(numbers, dtype=np.int32).tobytes()


CHANGES: list[dict[str, object]] = [{"layer": 2}, {"layer": -1}, {"part": None}]
CHANGES += [{"q_heads": heads} for heads in (3, -4, 1 << 20)]
WRONG_SIZES: list[list[int]] = [[*SIZES[:2], SIZES[2] + 4], SIZES[:2], []]
UNFIT: list[tuple[dict[str, object], list[int]]] = [
    *((changes, SIZES) for changes in CHANGES),
    *(({}, sizes) for sizes in WRONG_SIZES),
]


@pytest.mark.parametrize(("changes", "sizes"), UNFIT)
def test_what_does_not_fit_is_refused(owner: Lender, changes: dict[str, object], sizes: list[int]) -> None:
    before = content(owner.engine)
    with pytest.raises(InvalidMessage):
        offer(owner, request(**changes), sizes)
    assert is_equal(before, content(owner.engine))


def test_grants_of_others_and_unknown_generations_are_refused(owner: Lender) -> None:
    for grants in ((GrantRef(9, 1),), (GrantRef(1, 2),), ()):
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
    reception.abandon()
    assert not any(bool(pool.any()) for pool in content(owner.engine)), "it never arrived"
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


def test_host_memory_has_descriptions_of_its_own(owner: Lender) -> None:
    with pytest.raises(StaleEpoch):
        offer(owner, request(tier=KvTier.HOST), SIZES)
    offer(owner, request(), SIZES)
    with pytest.raises(InvalidMessage, match="never described"):
        offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,), part=None), SIZES)
    offer(owner, request(tier=KvTier.HOST, grants=(HOST_GRANT,)), SIZES)


BLOCKS = 8


def ask(
    owner: Lender, kind: str, layer: int, blocks: Sequence[int], *, step: int = 1, described: bool = True
) -> None:
    """Send the part of a row that sees all blocks and writes to the last."""
    homes = Homes(0)
    homes.place(range(len(blocks)), 1, blocks)
    spans = pack([Span(len(blocks) * BLOCK_TOKENS - 1, 1, list(range(len(blocks))))], BLOCK_TOKENS)
    _, part = split(spans, homes, BLOCK_TOKENS)
    asked = Request(
        step=step,
        layer=layer,
        grants=tuple(owner.book.refs),
        part=to_wire(part.spans) if described else None,
        q_heads=HEADS if kind == ATTEND else 0,
        indices=indices(0) if kind == FETCH else b"",
    )
    written = [4 * KV_HEADS * DIM] * 2
    sizes = {ATTEND: [4 * HEADS * DIM, *written], WRITE: written}
    reception = offer(owner, request_encoder.encode(asked), sizes.get(kind, []), kind)
    fill(reception, 9.0)
    reception.commit()


@pytest.fixture
def two(llama: Any) -> Iterator[Lender]:
    with lender(llama, BLOCKS, lent=[[2, 5]]) as made:
        yield made


@pytest.mark.parametrize("kind", [ATTEND, WRITE, FETCH])
@pytest.mark.parametrize("returned", [2, 5])
def test_a_late_layer_does_not_write_to_a_returned_block(kind: str, returned: int, two: Lender) -> None:
    """A layer of an earlier description wrote to a block that belonged to another debtor by then."""
    ask(two, kind, 0, [2, 5])
    two.book.give_back(1, returned)
    assert [part.blocks for part in two.book.freed] == [(returned,)]
    before = content(two.engine)
    with pytest.raises(StaleEpoch, match="borrow again"):
        ask(two, kind, 1, [2, 5], described=False)
    assert is_equal(before, content(two.engine))
    two.book.give_back(1, 7 - returned)
    assert [part.blocks for part in two.book.freed] == [(returned,), (7 - returned,)], "no user was left"
    two.book.grants.check_integrity()


def test_blocks_are_looked_up_once_until_a_grant_changes(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 0
    loans = LentGrants.loans

    def count(*of: Any) -> Any:
        nonlocal lookups
        lookups += 1
        return loans(*of)

    monkeypatch.setattr(LentGrants, "loans", count)
    with lender(llama, BLOCKS, lent=[[2, 5, 6]]) as owner:
        for layer in (0, 1, 0, 1):
            ask(owner, WRITE, layer, [2, 5], described=layer == 0 and not lookups)
        assert lookups == 1
        owner.book.give_back(1, 6)
        for layer in (0, 1):
            ask(owner, WRITE, layer, [2, 5], described=False)
        assert lookups == 2


@pytest.mark.parametrize("seed", range(20))
def test_only_blocks_lent_now_are_written(seed: int, llama: Any) -> None:
    """Grants, returns, ended leases, and layers of the last steps, in any order."""
    with lender(llama, BLOCKS, lent=()) as owner:
        lend_and_ask(owner, random.Random(seed))


def lend_and_ask(owner: Lender, dice: random.Random) -> None:
    world = owner.book
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
            ask(owner, WRITE, 0, steps[number], step=number)
        elif event == "layer" and steps:
            step = dice.choice(list(steps)[-4:])
            before = content(owner.engine)
            if set(steps[step]) <= set(lent) and world.refs:
                ask(owner, WRITE, 1, steps[step], step=step, described=False)
                before = content(owner.engine)
            else:
                with pytest.raises(StaleEpoch):
                    ask(owner, WRITE, 1, steps[step], step=step, described=False)
            assert is_equal(before, content(owner.engine))
        world.grants.check_integrity()


@pytest.mark.parametrize("mode", [ShipMode.SHIP, ShipMode.FETCH])
def test_a_debtor_continues_while_it_returns_but_not_on_returned_blocks(
    mode: ShipMode, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns blocks between two layers of a step, over a real link."""
    prompt = [5, 9, 2, 7, 11, 3, 8, 6, 4, 12]
    point = SamplePoint(Sampling(seed=0, max_tokens=32, temperature=0.0), 0, 0, prompt)
    expected = make_engine(llama, 3).step([Row(prompt, 0, [0, 1, 2], point)])
    with lender(llama, BLOCKS, lent=[[2, 5, 6]]) as owner:
        world = owner.book
        small = make_engine(llama, 1)
        debtor = connect(small, [], 0, choose=always(mode))
        holder = debtor.add(owner.dial(), [GRANT])
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
            assert mode is ShipMode.SHIP, (
                "natively a step keeps its blocks to the end; the next has not got them"
            )
            wait_until(lambda: len(world.freed) == 2)
            small.step([row])
        assert not world.grants.lent_under(KvTier.DEVICE, [1])[5]
        debtor.close()


# --- grants, on the threads that serve links


def test_only_the_debtor_enters_and_only_during_the_lease() -> None:
    book = Book([[2, 5, 6]], BLOCKS)
    assert book.lent.enter(DEBTOR, [GRANT]) == (GRANT,)
    book.give_back(1, 5)
    book.lent.leave([GRANT])
    assert [freed.blocks for freed in book.freed] == [(5,)]
    assert book.lent.enter(DEBTOR, [GRANT]) == (GrantRef(1, 2),), "what to compare with the next time"
    book.lent.leave([GRANT])
    assert not book.lent.enter(Peer(DEBTOR.worker_id, 2), [GRANT])
    assert not book.lent.enter(Peer("other", DEBTOR.incarnation), [GRANT])
    assert not book.lent.enter(DEBTOR, [GRANT, GrantRef(2, 1)])
    book.now_s = 4.6
    assert not book.lent.enter(DEBTOR, [GRANT])
    (freed,) = book.grants.tick(4.6)
    assert freed.blocks == (2, 6), "a refused call leaves no user"


def test_loans_are_reported_while_links_free_blocks() -> None:
    """A heartbeat iterated over a table that a link's thread changed, which stopped the worker."""
    grants = Grants("creditor", 1, Terms(4096, 1e9, 0.5), 4096, lock=threading.RLock())
    freed: list[Freed] = []
    lent, debts = LentGrants(grants, freed.append, lambda: 0.0), Debts("creditor", 4096, 1)
    telling, failures = threading.Event(), []

    def serve_links() -> None:
        try:
            for number in range(300):
                asked = borrow(DEBTOR.worker_id, incarnation=7, request=number, blocks=1500)
                grant = grants.lend(asked, range(1500), 0.0).grant
                assert grant is not None
                ref = GrantRef(grant.grant_id, 1)
                assert lent.enter(DEBTOR, [ref])
                back = give_back(DEBTOR.worker_id, grant.grant_id, *grant.blocks, incarnation=7)
                assert grants.give_back(back)[1] is None
                lent.leave([ref])
        except BaseException as error:
            failures.append(error)
        finally:
            telling.set()

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=serve_links)
    try:
        thread.start()
        while not telling.is_set():
            assert loans(debts, grants, {})["lent_blocks"] in (0, 1500)
            grants.answer(borrow(DEBTOR.worker_id, incarnation=7, request=-1, blocks=1))
            grants.renew(renew(DEBTOR.worker_id, 1, incarnation=7), 0.0)
    finally:
        sys.setswitchinterval(before_s)
        thread.join()
    assert not failures and sum(len(part.blocks) for part in freed) == 300 * 1500


# --- parts on the wire


def part() -> PackedSpans:
    """Two sequences at creditor 1: a decode and a chunk that begins in the middle of a block."""
    homes = Homes(4)
    homes.place(range(4, 12), 1, range(8))
    spans = [Span(9, 1, [0, 4, 5]), Span(6, 7, [6, 7, 1, 8])]
    return split(pack(spans, 4), homes, 4)[1].spans


@pytest.mark.parametrize("window_tokens", [0, 5])
def test_a_part_survives_the_round_trip(window_tokens: int) -> None:
    spans = replace(part(), window_tokens=window_tokens)
    found = from_wire(to_wire(spans), 4)
    for name in ("first_row", "first_position", "table_start", "key_end", "blocks", "slots"):
        assert np.array_equal(getattr(found.spans, name), getattr(spans, name))
    assert found.rows == len(spans.slots) and found.spans.window_tokens == window_tokens
    assert np.array_equal(found.kept_slots, spans.slots[spans.slots >= 0])


WRONG: dict[str, list[Any]] = {
    "key_end": [[10**6] * 4, [-1] * 4],
    "table_start": [[10**6] * 4, [-5] * 4],
    "first_row": [[0, 5, 3, 4, 6], [1, 2]],
    "first_position": [[-3] * 4, []],
    "blocks": [[], b"abc"],
    "slots": [[4 * 99] * 8, []],
    "window_tokens": [-1, 1 << 31],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, wrong in WRONG.items() for value in wrong]
)
def test_an_inconsistent_part_is_refused(name: str, value: Any) -> None:
    if isinstance(value, list):
        value = np.array(value, dtype=getattr(part(), name).dtype).tobytes()
    good = msgspec.structs.asdict(to_wire(part()))
    with pytest.raises(InvalidMessage):
        from_wire(PartWire(**(good | {name: value})), 4)
