"""Simulated engines that lend each other blocks over real links: places, errors and costs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.worker.core.costs.fitted import LLAMA2_13B_2_A100, RemoteCost
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.simulated import SimulatedEngine
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor
from services.worker.peers.attention.tokens import TokenDebtor, TokenMemory
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.server import WorkerDesk
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import CreditorLost, InternalError
from shared.messages.lending import KvTier
from shared.messages.sequence import Sampling
from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, DEBTOR, GRANT, HOST_GRANT, Book

OWN, LENT = 4, 6
"""Blocks of the debtor, and of each creditor."""
COST = RemoteCost(LLAMA2_13B_2_A100)
PROMPT = list(range(100, 100 + 9 * BLOCK_TOKENS))


class One:
    """An engine, and the modelled times of its steps."""

    def __init__(self, blocks: int, speed: float) -> None:
        self.steps_s: list[float] = []
        sizes: dict[str, Any] = {"vocabulary": 4096, "max_positions": 4096, "block_tokens": BLOCK_TOKENS}
        how: dict[str, Any] = {"cost": COST.cost, "remote_cost": COST, "sleep": self.steps_s.append}
        self.engine = SimulatedEngine(kv_blocks=blocks, speed=speed, **sizes, **how)


@dataclass
class World:
    """A debtor whose ids from `OWN` are blocks of the first creditor, then of the second."""

    debtor: One
    creditors: list[One]
    way: TokenDebtor
    hang_up: list[Callable[[], bool]]

    def step(self, tokens: Sequence[int], first: int, blocks: Sequence[int]) -> None:
        """Run a step that samples after the last token."""
        whole = PROMPT[:first] + list(tokens)
        index = 0 if len(tokens) > 1 else 1
        point = SamplePoint(Sampling(seed=1, max_tokens=100), 0, index, whole)
        (sampled,) = self.debtor.engine.step([Row(tokens, first, blocks, point)])
        assert sampled is not None


@contextmanager
def world(
    creditors: int = 2,
    *,
    fraction: float = 1.0,
    is_busy: bool = False,
    host: bool = False,
    attends: bool = True,
    speed: float = 1.0,
) -> Iterator[World]:
    debtor, lenders = One(OWN, speed), [One(LENT, speed) for _ in range(creditors)]
    way = TokenDebtor(debtor.engine, most_creditors=creditors, deadline_s=5.0)
    hang_up: list[Callable[[], bool]] = []
    with ExitStack() as stack:
        for number, lender in enumerate(lenders):
            tier, ref = (KvTier.HOST, HOST_GRANT) if host else (KvTier.DEVICE, GRANT)
            far = TokenMemory(np.zeros((LENT, BLOCK_TOKENS), dtype=np.int32), lender.engine, attends)
            creditor = Creditor(
                TokenMemory(lender.engine.tokens, lender.engine),
                Book([range(LENT)], LENT, LENT).lent,
                ComputeBudget(fraction),
                block_tokens=BLOCK_TOKENS,
                is_busy=lambda: is_busy,
                host=far if host else None,
            )
            desk = WorkerDesk(Peer(f"worker-{number}", 1))
            desk.serve(creditor.receivers)
            listener = TcpTransport().listen(desk)
            hang_up.append(partial(listener.close, 5.0))
            stack.callback(listener.close, 5.0)
            ticket = desk.issue(DEBTOR, valid_for_s=5.0)
            link = TcpTransport().dial(listener.address, DEBTOR, desk.own, ticket, deadline_s=5.0)
            holder = way.add(link, [ref], tier, attends=attends)
            first = OWN + number * LENT
            way.homes.place(range(first, first + LENT), holder, range(LENT))
        stack.callback(way.close)
        yield World(debtor, lenders, way, hang_up)


TABLE = [0, 5, 1, 10, 11, 7, 2, 8, 12]
"""Blocks of the debtor and both creditors in turn."""


def test_tokens_are_stored_where_the_tables_point() -> None:
    with world() as here:
        here.step(PROMPT[: 4 * BLOCK_TOKENS + 1], 0, TABLE)
        here.step(PROMPT[4 * BLOCK_TOKENS + 1 :], 4 * BLOCK_TOKENS + 1, TABLE)
        blocks = [PROMPT[at : at + BLOCK_TOKENS] for at in range(0, len(PROMPT), BLOCK_TOKENS)]
        for id_, tokens in zip(TABLE, blocks, strict=True):
            owner = here.debtor if id_ < OWN else here.creditors[(id_ - OWN) // LENT]
            block = id_ if id_ < OWN else (id_ - OWN) % LENT
            assert owner.engine.tokens[block].tolist() == tokens


def test_wrong_tokens_at_a_creditor_fail_the_next_step() -> None:
    with world() as here:
        here.step(PROMPT[:-1], 0, TABLE)
        here.creditors[0].engine.tokens[5 - OWN, 1] += 1
        with pytest.raises(InternalError, match="a creditor holds"):
            here.step(PROMPT[-1:], len(PROMPT) - 1, TABLE)


@pytest.mark.parametrize(("is_busy", "speed"), [(True, 1.0), (True, 10.0), (False, 1.0)])
def test_a_step_and_its_creditors_take_the_modelled_time(is_busy: bool, speed: float) -> None:
    """An idle creditor serves at no cost."""
    with world(is_busy=is_busy, speed=speed) as here:
        here.step(PROMPT[:-1], 0, TABLE)
        here.step(PROMPT[-1:], len(PROMPT) - 1, TABLE)
        chunk_s, decode_s = here.debtor.steps_s
        assert chunk_s * speed == pytest.approx(COST.step_s([(0, len(PROMPT) - 1)], 0, 0, [0, 0])), (
            "a round trip for each layer"
        )
        local, first, second = (BLOCK_TOKENS * blocks for blocks in (3, 3, 3))
        assert decode_s * speed == pytest.approx(COST.step_s([], 1, local, [first, second]))
        waited_s = decode_s - COST.step_s([], 1, local, []) / speed
        assert here.debtor.engine.remote.block_s == pytest.approx(waited_s / 6)
        lender = here.creditors[0]
        row = Row([5], 0, [5], None)
        for _ in range(2):
            lender.engine.step([row])
        own_s = COST.step_s([], 1, 1, [])
        assert lender.steps_s[0] * speed == pytest.approx(own_s + COST.serving_s(first) * is_busy)
        assert lender.steps_s[1] * speed == pytest.approx(own_s), "once"


@pytest.mark.parametrize("is_host", [False, True])
def test_blocks_are_copied_and_checked_where_a_creditor_does_not_compute(is_host: bool) -> None:
    """The creditor lends no time, or does not attend to its host memory."""
    how = {"host": True, "attends": False} if is_host else {"fraction": 0.0}
    with world(**how) as here:
        here.step(PROMPT[:-1], 0, TABLE)
        here.step(PROMPT[-1:], len(PROMPT) - 1, TABLE)
        copied_tokens = 6 * BLOCK_TOKENS
        expected_s = COST.step_s([], 1, len(PROMPT), []) + COST.copy_s(copied_tokens)
        assert here.debtor.steps_s[1] == pytest.approx(expected_s)
        here.way.homes.place([12], 2, [4])  # A block with other tokens.
        with pytest.raises(InternalError, match="a creditor holds"):
            here.step(PROMPT[-1:], len(PROMPT) - 1, TABLE)


def test_a_lost_creditor_ends_only_its_own_sequences() -> None:
    with world() as here:
        here.step(PROMPT[:-1], 0, TABLE)
        assert here.hang_up[0]()
        with pytest.raises(CreditorLost) as lost:
            here.step(PROMPT[-1:], len(PROMPT) - 1, TABLE)
        assert lost.value.creditor_id == "worker-0"
        second = [0, 1, 10, 11]
        here.step(PROMPT[: 3 * BLOCK_TOKENS + 2], 0, second)
        assert here.creditors[1].engine.tokens[1, :2].tolist() == PROMPT[3 * BLOCK_TOKENS :][:2]


def test_blocks_are_read_and_brought_home() -> None:
    with world() as here:
        here.step(PROMPT, 0, TABLE)
        records = Records(here.debtor.engine.pools)
        rows = np.zeros((2, records.record_bytes), dtype=np.uint8)
        here.way.read([12, 5], rows)
        expected = [PROMPT[8 * BLOCK_TOKENS :], PROMPT[BLOCK_TOKENS : 2 * BLOCK_TOKENS]]
        assert rows.view(np.int32).tolist() == expected
        here.way.bring_home([(10, 3)])
        assert here.debtor.engine.tokens[3].tolist() == PROMPT[3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS]
