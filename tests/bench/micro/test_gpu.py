"""What `bench gpu` counts and how it makes its problems; the timing itself needs a device."""

from pathlib import Path

import pytest
import torch

from bench.micro.gpu import attention, bench, steps
from bench.micro.gpu.steps import Shape
from shared.errors import ConfigError
from tests.bench.rig import context_of
from tests.triton_here import skip_unless_interpreted

CPU = torch.device("cpu")
SMALL = Shape(layers=2, hidden=32, intermediate=48, q_heads=4, kv_heads=2, vocabulary=50, head_dim=16)


def test_without_a_device_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="no CUDA device"):
        bench.run(context_of("gpu", tmp_path, quick=False))


def test_a_step_reads_every_weight_but_the_embedding_and_all_keys() -> None:
    module = steps.random_llama(SMALL, 64, torch.bfloat16, CPU)
    assert next(module.parameters()).dtype is torch.bfloat16
    attention = (4 + 2 + 2) * 16 * 32 + 4 * 16 * 32
    weights = 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 50 * 32
    assert steps.step_bytes(module, SMALL, 3, 20) == 2 * weights + 2 * SMALL.kv_bytes(3, 20)


def test_all_sides_compute_the_same() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")
    if torch.cuda.is_available():
        pytest.skip("the bench itself compares them on the device")
    skip_unless_interpreted()
    tables = torch.randperm(6).view(2, 3)
    keys = attention.make_keys(SMALL, tables, torch.float32, CPU, seed=1)
    ours = attention.our_attention(SMALL, tables, multiprocessors=4)(keys)
    torch.testing.assert_close(ours, attention.sdpa_attention(keys), rtol=1e-5, atol=1e-5)
