"""The GPU bench: refused without a device; its measurement on a CPU, with threads instead of streams."""

from pathlib import Path

import pytest
import torch

from bench.micro import pie_gpu
from bench.micro.gpu.steps import Shape
from shared.errors import ConfigError
from tests.bench.rig import context_of

CPU = torch.device("cpu")
SMALL = Shape(layers=6, hidden=64, intermediate=96, q_heads=4, kv_heads=2, vocabulary=50, head_dim=16)


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigError, match="no CUDA device"):
        pie_gpu.run(context_of("pie-gpu", tmp_path, quick=False))


def test_copies_run_beside_the_computation() -> None:
    compute = pie_gpu.layer_of(SMALL, 4, CPU, torch.float32)
    plain, swapped = (
        pie_gpu.measure(SMALL, level, blocks, 24, compute, CPU, 8, torch.float32)
        for level, blocks in ((0, 24), (4, 16))
    )
    assert plain.step_s > 0 and plain.bytes_per_s == 0 and plain.stall_share == 0
    assert swapped.step_s > 0 and swapped.bytes_per_s > 0 and swapped.stall_share >= 0


@pytest.mark.gpu
def test_on_a_device_the_overlap_is_measured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    compute = pie_gpu.layer_of(SMALL, 4, device)
    assert pie_gpu.measure(SMALL, 4, 16, 24, compute, device, 8).bytes_per_s > 0
