"""An engine with blocks at other workers answers like an engine with all blocks of its own."""

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from bench.micro.distattention.creditor import creditor_processes
from services.worker.core.settings import PieSettings
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.remote import Partial
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.core.cost import ShipMode, choose_mode
from services.worker.peers.attention.debtor import Chooser
from services.worker.peers.attention.interfaces import LentTier
from services.worker.peers.attention.messages import ATTEND, FETCH, NATIVE, WRITE, Request
from services.worker.peers.attention.shares import FetchedShare
from services.worker.peers.transport.link import Call, PeerLink
from services.worker.pie.blocks import BlockPie
from shared.errors import CreditorLost
from shared.messages.base import decode
from shared.messages.lending import KvTier
from shared.messages.sequence import Sampling
from tests.patience import BUSY_S
from tests.services.worker.conftest import VOCABULARY, ModelFactory, new_model
from tests.services.worker.engine.rig import Sequences
from tests.services.worker.peers.attention.process import modules
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    DEBTOR,
    GRANT,
    Lender,
    add_host,
    always,
    connect,
    lender,
    make_debtor,
    make_engine,
)

GREEDY = Sampling(seed=0, max_tokens=64, temperature=0.0, top_logprobs=0)
CHOOSERS: dict[str, Chooser] = {
    "ship": always(ShipMode.SHIP),
    "fetch": always(ShipMode.FETCH),
    "measured": choose_mode,
}


def generate(
    engine: TorchEngine, prompts: list[list[int]], blocks: list[list[int]], chunk: int, count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Return greedy answers and their log-probabilities, all prompts in one batch."""
    sequences = Sequences(engine, BlockPool(1, BLOCK_TOKENS), prompts, GREEDY)
    sequences.blocks = [list(each) for each in blocks]
    ends = [len(prompt) + count for prompt in prompts]
    while running := [at for at, end in enumerate(ends) if len(sequences.tokens[at]) < end]:
        sequences.step(running, chunk)
    return [sequences.answer(at, count) for at in range(len(prompts))], sequences.logprobs


def _long(dice_seed: int, tokens: int) -> list[int]:
    dice = random.Random(dice_seed)
    return [dice.randrange(VOCABULARY) for _ in range(tokens)]


def alone(
    model: Any, prompt: list[int], count: int, chunk: int = 9, attention: AttentionMode = "auto"
) -> tuple[list[list[int]], list[int]]:
    """Return the answer of an engine with enough blocks of its own, and those blocks."""
    blocks = list(range(-(-(len(prompt) + count) // BLOCK_TOKENS)))
    engine = make_engine(model, len(blocks), attention)
    return generate(engine, [prompt], [blocks], chunk, count)[0], blocks


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("way", CHOOSERS)
@pytest.mark.parametrize("architecture", ["llama", "opt", "mistral_window", "gemma2"])
def test_the_text_equals_that_of_one_big_engine(
    architecture: str, way: str, attention: AttentionMode, make_model: ModelFactory
) -> None:
    dice = random.Random(5)
    model = make_model(architecture)
    prompts = [[dice.randrange(VOCABULARY) for _ in range(length)] for length in (70, 3, 41)]
    count = 12
    needed = [-(-(len(prompt) + count) // BLOCK_TOKENS) for prompt in prompts]
    big = make_engine(model, sum(needed), attention)
    starts = [sum(needed[:index]) for index in range(len(needed))]
    plain = [list(range(start, start + size)) for start, size in zip(starts, needed, strict=True)]
    expected, expected_logprobs = generate(big, prompts, plain, 9, count)
    with ExitStack() as stack:
        lenders = [stack.enter_context(lender(model, 12)) for _ in range(3)]
        small = make_engine(model, 6, attention)
        debtor = make_debtor(small, lenders, 12, choose=CHOOSERS[way])
        stack.callback(debtor.close)
        ids = list(range(6 + 36))
        dice.shuffle(ids)
        scattered = [[ids.pop() for _ in range(size)] for size in needed]
        answers, logprobs = generate(small, prompts, scattered, 9, count)
    assert answers == expected
    for each, other in zip(logprobs, expected_logprobs, strict=True):
        assert torch.allclose(torch.tensor(each), torch.tensor(other), atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("way", CHOOSERS)
@pytest.mark.parametrize("architecture", ["llama", "opt", "mistral_window", "gemma2"])
def test_a_gpu_borrows_from_a_gpu_and_from_a_cpu(
    architecture: str, way: str, make_model: ModelFactory
) -> None:
    model = make_model(architecture)
    on_gpu = copy.deepcopy(model).to("cuda")
    prompt, count = _long(6, 70), 12
    expected, needed = alone(on_gpu, prompt, count)
    with ExitStack() as stack:
        lenders = [stack.enter_context(lender(each, 8)) for each in (on_gpu, model)]
        small = make_engine(on_gpu, 6)
        debtor = make_debtor(small, lenders, 8, choose=CHOOSERS[way])
        stack.callback(debtor.close)
        ids = list(range(6 + 16))
        random.Random(5).shuffle(ids)
        answers, _ = generate(small, [prompt], [ids[: len(needed)]], 9, count)
    assert answers == expected


@pytest.mark.parametrize("attention", ["native", "torch"])
@pytest.mark.parametrize("way", ["ship", "fetch", "refused"])
def test_text_is_the_same_with_blocks_in_both_tiers_of_a_creditor(
    way: str, attention: AttentionMode, llama: Any
) -> None:
    """`refused`: the creditor does not attend to its host memory."""
    prompt, count = _long(6, 70), 12
    expected, ids = alone(llama, prompt, count, attention=attention)
    own, device, host = 3, 6, len(ids) - 9
    attends = way != "refused"
    lent = lender(llama, device, host_blocks=host, host_attends=attends, attention=attention)
    with lent as owner, ExitStack() as stack:
        small = make_engine(llama, own, attention)
        choose = always(ShipMode.FETCH) if way == "fetch" else always(ShipMode.SHIP)
        debtor = make_debtor(small, [owner], device, choose=choose)
        stack.callback(debtor.close)
        add_host(debtor, owner, range(own + device, len(ids)), attends=attends)
        random.Random(6).shuffle(ids)
        answers, _ = generate(small, [prompt], [ids], 9, count)
        assert owner.host is not None and all(bool(pool.any()) for pool in owner.host.pools[0])
        homes = debtor.homes.locate(ids)[0].tolist()
        assert sorted(set(homes)) == [0, 1, 2]
    assert answers == expected


@pytest.mark.parametrize(
    ("creditors", "way"), [(1, "ship"), pytest.param(3, "measured", marks=pytest.mark.slow)]
)
def test_a_prompt_of_three_times_the_own_kv_is_answered_by_processes(
    creditors: int, way: str, llama: Any
) -> None:
    prompt, count, own = _long(11, 180), 16, 15
    assert len(prompt) >= 3 * own * BLOCK_TOKENS
    expected, blocks = alone(llama, prompt, count, chunk=24)
    each = -(-(len(blocks) - own) // creditors)
    with creditor_processes(modules("llama", each, [f"worker-{n}" for n in range(creditors)])) as running:
        small = make_engine(llama, own)
        links = [process.dial(DEBTOR) for process in running]
        debtor = connect(small, links, each, choose=CHOOSERS[way])
        answers, _ = generate(small, [prompt], [blocks], 24, count)
        debtor.close()
    assert answers == expected


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_dead_or_stopped_creditor_is_reported_and_the_others_continue(
    blow: signal.Signals, llama: Any
) -> None:
    prompt, own, each = _long(12, 40), 4, 4
    other = _long(13, 30)
    expected, _ = alone(llama, other, 8, chunk=24)
    with creditor_processes(modules("llama", 16, ["worker-a", "worker-b"])) as running:
        small = make_engine(llama, own)
        links: list[PeerLink] = [process.dial(DEBTOR) for process in running]
        debtor = connect(small, links, 16, deadline_s=1.0, choose=CHOOSERS["ship"])
        of_both = [*range(own), *range(own, own + each), *range(own + 16, own + 16 + each)]
        row = Row(prompt, 0, of_both, None)
        assert small.step([row]) == [None]
        os.kill(running[0].process.pid, blow)
        os.waitid(os.P_PID, running[0].process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        began_s = time.monotonic()
        with pytest.raises(CreditorLost) as lost:
            small.step([row])
        assert lost.value.creditor_id == "worker-a"
        assert time.monotonic() - began_s < 1.0 + BUSY_S
        of_b = [own + 16 + 4 + index for index in range(10)]
        answers, _ = generate(small, [other], [of_b], 24, 8)
        debtor.close()
    assert answers == expected


@pytest.mark.parametrize("way", ["ship", "fetch"])
def test_a_step_that_fails_midway_keeps_all_loans(
    way: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread answers broke the links in the next step, which ended every borrower."""
    prompts = [_long(16, 30), _long(17, 26)]
    needed = 10
    tables = [list(range(needed)), list(range(needed, 2 * needed))]
    expected, _ = generate(make_engine(llama, 2 * needed), prompts, tables, 9, 6)
    with lender(llama, 8) as one, lender(llama, 8) as other:
        small = make_engine(llama, 4)
        debtor = connect(small, [one.dial(), other.dial()], 8, choose=CHOOSERS[way])
        borrowed = [[0, 1, *range(4, 12)], [2, 3, *range(12, 20)]]
        assert small.step([Row(prompts[0], 0, borrowed[0], None)]) == [None]
        own: list[tuple[Any, str]] = [(small.attention, "join")]
        staged = [(each, "attend_part") for each in debtor._lendings[1].staging.backends]
        for layer in range(2):
            with monkeypatch.context() as failing:
                for part, call in staged if way == "fetch" else own:
                    failing.setattr(part, call, failing_at(layer, getattr(part, call)))
                with pytest.raises(MemoryError):
                    small.step(
                        [Row(prompt, 0, held, None) for prompt, held in zip(prompts, borrowed, strict=True)]
                    )
            debtor.bring_home([(4, 0)])
        answers, _ = generate(small, prompts, borrowed, 9, 6)
        debtor.close()
    assert answers == expected


def failing_at(layer: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """A call that runs out of memory at that layer."""

    def call(at: int, *args: Any) -> Any:
        if at == layer:
            raise MemoryError("as told")
        return real(at, *args)

    return call


def test_a_creditor_over_its_budget_gives_blocks_instead_of_time(llama: Any) -> None:
    prompt, count = _long(14, 40), 6
    expected, blocks = alone(llama, prompt, count)
    with lender(llama, len(blocks), fraction=1e-6, is_busy=lambda: True) as stingy:
        stingy.creditor.budget.on_computed(1.0, is_busy=True)
        small = make_engine(llama, 4)
        debtor = make_debtor(small, [stingy], len(blocks), choose=CHOOSERS["ship"])
        answers, _ = generate(small, [prompt], [blocks], 9, count)
        debtor.close()
        assert stingy.creditor.budget._saved_s < -0.89, "no time was lent"
    assert answers == expected


def test_blocks_are_read_between_the_layers_of_a_step(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The creditor forgot a step while another thread copied blocks home, and the answer lost its KV."""
    prompt, count = _long(17, 40), 6
    expected, blocks = alone(llama, prompt, count)
    with lender(llama, len(blocks)) as owner:
        small = make_engine(llama, 4)
        debtor = make_debtor(small, [owner], len(blocks), choose=CHOOSERS["fetch"])
        reader = LentTier(owner.dial(), (GRANT,), KvTier.DEVICE, attends=True)
        some = np.arange(2 * debtor.staging_blocks, dtype=np.int32)
        rows = np.zeros((len(some), Records(small.pools).record_bytes), dtype=np.uint8)
        collect = FetchedShare.collect

        def collect_and_read(self: FetchedShare, layer: int) -> Iterator[Partial]:
            debtor.fetch(reader, some, rows)
            return collect(self, layer)

        monkeypatch.setattr(FetchedShare, "collect", collect_and_read)
        answers, _ = generate(small, [prompt], [blocks], 9, count)
        reader.link.close()
        debtor.close()
    assert answers == expected and rows.any(axis=1).all()


# --- one message per creditor and layer for the whole batch, described once

LAYERS = 2


class Noted:
    """Records the requests over a link."""

    def __init__(self, owner: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = owner.dial()
        self.kinds: list[str] = []
        self.described: list[bool] = []
        begin = self.link.begin

        def note(kind: str, header: bytes = b"", *given: Any, **how: Any) -> Call:
            self.kinds.append(kind)
            self.described.append(decode(header, Request).part is not None)
            return begin(kind, header, *given, **how)

        monkeypatch.setattr(self.link, "begin", note)


def rows(counts: list[tuple[int, int]]) -> list[Row]:
    """Return a batch of (first position, count), each in five of the lender's blocks."""
    return [
        Row([7 % VOCABULARY] * count, first, list(range(4 + 5 * at, 9 + 5 * at)), None)
        for at, (first, count) in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("mode", "attention", "first", "later"),
    [
        (ShipMode.SHIP, "native", [NATIVE], []),
        (ShipMode.SHIP, "torch", [ATTEND] * LAYERS, [ATTEND] * LAYERS),
        (ShipMode.FETCH, "native", [WRITE] * LAYERS, [FETCH] * LAYERS + [WRITE]),
    ],
)
def test_a_batch_takes_one_message_per_layer(
    mode: ShipMode,
    attention: AttentionMode,
    first: list[str],
    later: list[str],
    llama: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with lender(llama, 20) as owner:
        engine, noted = make_engine(llama, 4, attention), Noted(owner, monkeypatch)
        debtor = connect(engine, [noted.link], 20, choose=always(mode), staging_blocks=20)
        engine.step(rows([(0, 9), (0, 17), (0, 5)]))
        assert noted.kinds == first
        assert noted.described == [first != [NATIVE]] + [False] * (len(first) - 1)
        noted.kinds.clear()
        engine.step(rows([(9, 1), (17, 1), (5, 1)]))
        assert noted.kinds == later
        debtor.close()


# --- own blocks on the host by Pie, and borrowed ones at a creditor

DEVICE_BLOCKS, OWN_BLOCKS, BORROWED_BLOCKS = 12, 18, 9
"""A third of the own blocks in use are on the host."""


@pytest.mark.parametrize("mode", [ShipMode.SHIP, ShipMode.FETCH])
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [
        ("llama", "native"),
        ("llama", "torch"),
        ("mistral_window", "native"),
        ("mistral_window", "torch"),
        ("gemma2", "native"),
    ],
)
def test_the_text_beside_pie_equals_that_of_one_big_engine(
    architecture: str, attention: AttentionMode, mode: ShipMode
) -> None:
    dice, count, blocks = random.Random(7), 12, OWN_BLOCKS + BORROWED_BLOCKS
    prompt, model = _long(7, blocks * BLOCK_TOKENS - count), new_model(architecture, num_hidden_layers=6)
    expected, _ = generate(make_engine(model, blocks), [prompt], [list(range(blocks))], 9, count)
    with lender(model, BORROWED_BLOCKS) as owner, ExitStack() as stack:
        pie = PieSettings(enabled=True, expansion="fixed", fifo_layers=5, notice_s=0.0)
        small = TorchEngine(
            describe(new_model(architecture, num_hidden_layers=6)),
            kv_blocks=DEVICE_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            pie=pie,
            attention=attention,
        )
        assert isinstance(small.pie, BlockPie)
        stack.callback(small.pie.close)
        debtor = make_debtor(small, [owner], BORROWED_BLOCKS, choose=always(mode))
        stack.callback(debtor.close)
        ids = list(small.make_pool().allocate(OWN_BLOCKS))
        ids += range(small.own_ids, small.own_ids + BORROWED_BLOCKS)
        dice.shuffle(ids)
        answers, _ = generate(small, [prompt], [ids], 9, count)
        assert not small.pie.kv.residency.is_plain
    assert answers == expected
