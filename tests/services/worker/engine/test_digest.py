"""KV is exchanged between equal weights only."""

import copy

import torch

from services.worker.engine.attention import LayerShape
from services.worker.engine.digest import layout_name, weights_digest
from tests.services.worker.conftest import build_model
from tests.services.worker.prefix_rig import make_engine


def test_equal_weights_have_one_digest_and_one_changed_number_another() -> None:
    model = build_model("llama")
    other = copy.deepcopy(model)
    assert weights_digest(model) == weights_digest(other)
    with torch.no_grad():
        next(other.parameters())[3, 5] += 1e-3
    assert weights_digest(model) != weights_digest(other)


def test_the_layout_tells_layers_apart() -> None:
    assert layout_name([LayerShape(2, 16, 16)]) != layout_name([LayerShape(1, 32, 16)])


def test_an_engines_fingerprint_covers_model_and_block_size() -> None:
    engines = [make_engine(), make_engine(), make_engine(architecture="qwen3")]
    prints = [engine.fingerprint for engine in engines]
    assert prints[0] == prints[1] != prints[2]
