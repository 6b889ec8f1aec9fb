"""Own blocks on the host and borrowed ones at a creditor, in one step, with and without sliding windows."""

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.pie.blocks import BlockPie
from services.worker.pie.settings import PieSettings
from tests.services.worker.conftest import ARCHITECTURES, VOCABULARY
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    always,
    lender,
    make_debtor,
    make_engine,
)
from tests.services.worker.peers.attention.test_debtor import generate

LAYERS = 6
DEVICE_BLOCKS, OWN_BLOCKS, BORROWED_BLOCKS = 12, 18, 9
"""A third of the own blocks in use are on the host."""


def make_model(architecture: str) -> Any:
    class_name, settings = ARCHITECTURES[architecture]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(7)
    return model_class(model_class.config_class(**settings | {"num_hidden_layers": LAYERS})).eval()


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
def test_the_text_equals_that_of_one_big_engine(
    architecture: str, attention: AttentionMode, mode: ShipMode
) -> None:
    dice, count, blocks = random.Random(7), 12, OWN_BLOCKS + BORROWED_BLOCKS
    prompt = [dice.randrange(VOCABULARY) for _ in range(blocks * BLOCK_TOKENS - count)]
    big = make_engine(make_model(architecture), blocks)
    expected, _ = generate(big, [prompt], [list(range(blocks))], 9, count)
    with lender(make_model(architecture), BORROWED_BLOCKS) as owner, ExitStack() as stack:
        pie = PieSettings(enabled=True, expansion="fixed", fifo_layers=5, notice_s=0.0)
        model = describe(make_model(architecture))
        small = TorchEngine(
            model, kv_blocks=DEVICE_BLOCKS, block_tokens=BLOCK_TOKENS, pie=pie, attention=attention
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
