"""Native steps over a link, and seals: the same numbers, no access to what is not lent, no flipped bit."""

import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.settings import HostAttention
from services.worker.engine.native import library as native
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.paged import Shape
from services.worker.engine.partition import Homes, Part, split
from services.worker.engine.spans import Span, pack
from services.worker.peers.attention import exchange
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.exchange import Asker, serve
from services.worker.peers.attention.memory import (
    LentMemory,
    NativeSeals,
    TorchSeals,
    device_memory,
    host_memory,
)
from services.worker.peers.attention.messages import NATIVE
from services.worker.peers.transport.pipe import Pipe
from shared.errors import (
    CorruptedKv,
    CreditorLost,
    DeadlineExceeded,
    InvalidMessage,
    KvasirError,
    PeerLost,
    StaleEpoch,
)
from tests.patience import PATIENCE_S, wait_until
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    DIM,
    HEADS,
    KV_HEADS,
    add_host,
    always,
    connect,
    lender,
    make_engine,
)

LAYERS = 2
BLOCKS = 8
SHAPE = Shape(0.25)


class Ends:
    """A creditor's thread and a debtor's asker at the ends of a socket; blocks 1 to 5 are lent."""

    def __init__(self, model: Any) -> None:
        self.memory: LentMemory = device_memory(make_engine(model, BLOCKS).attention)
        seals = self.memory.backend
        assert isinstance(seals, NativeSeals)
        near, far = socket.socketpair()
        self.debtor, self.creditor = Pipe(near), Pipe(far)
        self.asker = Asker(seals.memory.library, self.debtor, PATIENCE_S)
        self.lent = np.zeros(BLOCKS, dtype=np.bool_)
        self.lent[1:6] = True
        self.ended: list[KvasirError | None] = []
        self._seals = seals
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not serve(
                self._seals.memory, self.creditor, self.lent, q_heads=HEADS, is_full=False
            ).is_over:
                pass
            self.ended.append(None)
        except KvasirError as error:
            self.ended.append(error)
            self.creditor.close()

    def content(self) -> list[torch.Tensor]:
        return [pool.clone() for pools in self.memory.pools for pool in pools]

    def close(self) -> None:
        self.debtor.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.creditor.close()


@pytest.fixture
def ends(llama: Any) -> Iterator[Ends]:
    made = Ends(llama)
    try:
        yield made
    finally:
        made.close()


def part_of(first: int, count: int, blocks: Sequence[int]) -> Part:
    """Return the part of a sequence with lent blocks only."""
    homes = Homes(1)
    ids = range(1, 1 + len(blocks))
    homes.place(ids, 1, blocks)
    return split(pack([Span(first, count, ids)], BLOCK_TOKENS), homes, BLOCK_TOKENS)[1]


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(count, HEADS, DIM, generator=generator)
    key, value = torch.randn(2, count, KV_HEADS, DIM, generator=generator)
    return query, key, value


def test_an_exchange_returns_what_the_operator_computes(llama: Any, ends: Ends) -> None:
    reference = device_memory(make_engine(llama, BLOCKS).attention).backend
    for step, (first, count) in enumerate(((0, 9), (9, 1), (10, 1))):
        part = part_of(first, count, [4, 2, 5])
        given = rows(count, step)
        ends.asker.begin(part)
        for layer in range(LAYERS):
            ends.asker.ask(layer, *given, SHAPE)
            reference.write(layer, given[1], given[2], torch.from_numpy(part.spans.slots))
            expected = reference.attend_part(layer, part.spans, given[0], SHAPE)
            found = ends.asker.take()
            assert found is not None and found[2] > 0
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    ends.asker.stop()
    wait_until(lambda: ends.ended)
    assert ends.ended == [None]


def test_a_step_given_up_is_followed_by_another(ends: Ends) -> None:
    part, given = part_of(0, 5, [4, 2]), rows(5)
    ends.asker.begin(part)
    ends.asker.ask(0, *given, SHAPE)
    first = ends.asker.take()
    ends.asker.give_up()
    ends.asker.begin(part)
    ends.asker.ask(0, *given, SHAPE)
    again = ends.asker.take()
    assert first is not None and again is not None and torch.equal(first[0], again[0])


@pytest.mark.parametrize("blocks", [[0, 2], [2, 6], [2, 7]])
def test_blocks_that_are_not_lent_are_refused(blocks: list[int], ends: Ends) -> None:
    before = ends.content()
    ends.asker.begin(part_of(0, 5, blocks))
    ends.asker.ask(0, *rows(5), SHAPE)
    with pytest.raises(StaleEpoch):
        ends.asker.take()
    wait_until(lambda: ends.ended)
    assert isinstance(ends.ended[0], StaleEpoch)
    assert all(torch.equal(*each) for each in zip(before, ends.content(), strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_no_part_accesses_blocks_that_are_not_lent(seed: int, ends: Ends) -> None:
    """Any numbers of a part are replaced."""
    rng = random.Random(seed)
    part = part_of(rng.randrange(6), rng.randrange(1, 6), [4, 2, 5])
    arrays = {
        name: getattr(part.spans, name).copy()
        for name in ("first_row", "first_position", "table_start", "key_end", "blocks", "slots")
    }
    for _ in range(rng.randrange(1, 4)):
        array = arrays[rng.choice(list(arrays))]
        array[rng.randrange(len(array))] = rng.choice((-2, -1, 0, 1, 3, 7, 8, 31, 33, 1 << 30, (1 << 31) - 1))
    spoilt = replace(part, spans=replace(part.spans, **arrays))
    before = ends.content()
    try:
        ends.asker.begin(spoilt)
        ends.asker.ask(0, *rows(len(part.rows)), SHAPE)
        ends.asker.take()
    except (InvalidMessage, StaleEpoch, PeerLost):
        wait_until(lambda: ends.ended)
        assert all(torch.equal(*each) for each in zip(before, ends.content(), strict=True))
    for old, new in zip(before, ends.content(), strict=True):
        assert torch.equal(old[~ends.lent], new[~ends.lent])


@pytest.mark.parametrize("at", [0, 5, 30, 40, 200, 700])
def test_a_message_corrupted_in_transit_is_not_computed(at: int, ends: Ends) -> None:
    """`at`: a byte of the step and the first request."""
    sent = bytearray()
    near, tap = socket.socketpair()
    spy = Pipe(near)
    asker = Asker(ends._seals.memory.library, spy, PATIENCE_S)
    asker.begin(part_of(0, 5, [4, 2]))
    asker.ask(0, *rows(5), SHAPE)
    tap.setblocking(False)
    while True:
        try:
            sent += tap.recv(1 << 16)
        except BlockingIOError:
            break
    sent[at] ^= 4
    before = ends.content()
    ends.debtor.send([bytes(sent)], time.monotonic() + PATIENCE_S)
    if at < 40:  # It may have made the creditor wait for more than there is.
        ends.debtor.sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: ends.ended)
    assert isinstance(ends.ended[0], InvalidMessage | PeerLost)
    assert all(torch.equal(*each) for each in zip(before, ends.content(), strict=True))
    spy.close()
    tap.close()


def test_a_silent_debtor_is_given_up(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.1)
    ends = Ends(llama)
    try:
        ends.asker.begin(part_of(0, 5, [4, 2]))
        wait_until(lambda: ends.ended)
        assert isinstance(ends.ended[0], DeadlineExceeded)
    finally:
        ends.close()


def test_a_creditor_that_hangs_up_is_detected_at_once(ends: Ends) -> None:
    ends.asker.begin(part_of(0, 5, [4, 2]))
    ends.creditor.sock.shutdown(socket.SHUT_RDWR)
    began_s = time.monotonic()
    with pytest.raises(PeerLost):
        ends.asker.ask(0, *rows(5), SHAPE)
        ends.asker.take()
    assert time.monotonic() - began_s < PATIENCE_S / 2


def test_native_steps_use_the_creditors_interpreter_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the announcement reaches the creditor's interpreter."""
    with lender(llama, BLOCKS) as owner:
        engine = make_engine(llama, 1)
        debtor = connect(engine, [owner.dial()], BLOCKS, choose=always(ShipMode.SHIP))
        asked: list[str] = []
        real = owner.desk.receiver

        def receiver(kind: str) -> Any:
            asked.append(kind)
            return real(kind)

        monkeypatch.setattr(owner.desk, "receiver", receiver)
        attention = engine.attention
        for first in range(4):
            attention.begin([Span(first, 1, [2, 3])], 1)
            for layer in range(LAYERS):
                attention.attend(layer, *rows(1, first), SHAPE)
            attention.end()
        assert asked == [NATIVE]
        debtor.close()


PLACES = [4, 1, 3]
LENGTH = 2 * BLOCK_TOKENS + 3


def flip(memory: LentMemory, layer: int, which: int, block: int, rng: random.Random) -> None:
    words = memory.pools[layer][which][block].view(torch.int32).view(-1)
    words[rng.randrange(len(words))] ^= 1 << rng.randrange(31)


def written(memory: LentMemory) -> None:
    """Rows of one sequence in three blocks."""
    memory.backend.adopt(np.array(PLACES, dtype=np.int32), np.full(len(PLACES), 7))
    for layer in range(LAYERS):
        slots = [block * BLOCK_TOKENS + at for block in PLACES for at in range(BLOCK_TOKENS)][:LENGTH]
        kv = torch.randn(2, LENGTH, KV_HEADS, DIM)
        memory.backend.write(layer, kv[0], kv[1], torch.tensor(slots))


def attended(memory: LentMemory, layer: int) -> torch.Tensor:
    spans = pack([Span(LENGTH, 1, [*PLACES, 0])], BLOCK_TOKENS)
    return memory.backend.attend_part(layer, spans, torch.ones(1, HEADS, DIM), Shape(0.25))[0]


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_always_found(llama: Any, attention: AttentionMode, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(llama, 6, attention)
    memory = device_memory(engine.attention) if seed % 2 else host_memory(engine.attention, 6)
    written(memory)
    before = [attended(memory, layer) for layer in range(LAYERS)]
    layer, which, block = rng.randrange(LAYERS), rng.randrange(2), rng.choice(PLACES)
    pool = memory.pools[layer][which]
    sound = pool.clone()
    flip(memory, layer, which, block, rng)
    with pytest.raises(CorruptedKv) as found:
        attended(memory, layer)
    assert found.value.block == block
    with pytest.raises(CorruptedKv):
        memory.backend.verify(layer, np.array(PLACES, dtype=np.int32))
    with pytest.raises(CorruptedKv):
        new = torch.ones(1, KV_HEADS, DIM)
        memory.backend.write(layer, new, new, torch.tensor([block * BLOCK_TOKENS + BLOCK_TOKENS - 1]))
    assert torch.equal(attended(memory, 1 - layer), before[1 - layer]), "other layers are as they were"
    pool.copy_(sound)
    assert torch.equal(attended(memory, layer), before[layer])


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_damage_before_a_loan_is_ignored(llama: Any, attention: AttentionMode) -> None:
    memory = device_memory(make_engine(llama, 6, attention).attention)
    written(memory)
    flip(memory, 0, 0, PLACES[1], random.Random(1))
    memory.backend.adopt(np.array(PLACES[1:2], dtype=np.int32), np.array([8]))
    new = torch.ones(1, KV_HEADS, DIM)
    memory.backend.write(0, new, new, torch.tensor([PLACES[1] * BLOCK_TOKENS]))
    attended(memory, 0)
    flip(memory, 0, 1, PLACES[0], random.Random(2))
    with pytest.raises(CorruptedKv):
        attended(memory, 0)


@pytest.mark.parametrize("mode", list(ShipMode))
@pytest.mark.parametrize("is_host", [False, True])
def test_the_debtor_loses_the_creditor_and_gets_no_token(llama: Any, mode: ShipMode, is_host: bool) -> None:
    with lender(llama, 6, host_blocks=6) as owner:
        engine = make_engine(llama, 1)
        debtor = connect(engine, [] if is_host else [owner.dial()], 6, choose=always(mode))
        if is_host:
            add_host(debtor, owner, range(1, 7))
        table = [2, 3, 4]
        kv_rows = torch.randn(3, 2 * BLOCK_TOKENS, 2 * KV_HEADS + HEADS, DIM)
        attention = engine.attention

        def step(first: int, count: int) -> None:
            attention.begin([Span(first, count, table)], 1 if count == 1 else 0)
            try:
                for layer in range(LAYERS):
                    given = kv_rows[layer, :count]
                    q, k, v = given[:, :HEADS], given[:, HEADS:-KV_HEADS], given[:, -KV_HEADS:]
                    attention.attend(layer, q, k, v, Shape(0.25))
                attention.end()
            except CreditorLost:
                attention.abandon()
                raise

        step(0, 2 * BLOCK_TOKENS)
        step(2 * BLOCK_TOKENS, 1)
        memory = owner.host if is_host else device_memory(owner.engine.attention)
        assert memory is not None
        flip(memory, 1, 0, 2, random.Random(3))
        with pytest.raises(CreditorLost, match="not what was written"):
            step(2 * BLOCK_TOKENS + 1, 1)
        # On the thread that serves the link: the debtor may hear of it first.
        wait_until(lambda: owner.creditor.corrupted_blocks == 1)
        debtor.close()


@pytest.mark.parametrize("attends", [True, False])
def test_host_memory_is_in_ram_for_an_engine_on_another_device(attends: bool) -> None:
    pool = torch.zeros(5, 2, 16, 4, device="meta"), torch.zeros(5, 2, 4, 16, device="meta")
    library_for = partial(native.choose, "auto", dtype=torch.float32)
    attention: Any = SimpleNamespace(
        pools=[pool, pool], threads=1, library_for=lambda device: library_for(device=device)
    )
    host = host_memory(attention, 3, attends=attends)
    assert host.attends is attends
    assert [tuple(each.shape) for each in host.pools[1]] == [(3, 2, 16, 4), (3, 2, 4, 16)]
    assert all(each.device.type == "cpu" for pools in host.pools for each in pools)
    assert isinstance(host.backend, NativeSeals | TorchSeals)
    host.backend.write(0, torch.ones(1, 2, 16), torch.ones(1, 2, 16), torch.tensor([5]))
    assert host.pools[0][0][1, :, :, 1].eq(1).all()


def test_which_worker_attends_to_host_memory() -> None:
    assert HostAttention.AUTO.attends("cpu") and not HostAttention.AUTO.attends("cuda")
    assert HostAttention.COMPUTE.attends("cuda") and not HostAttention.FETCH.attends("cpu")
