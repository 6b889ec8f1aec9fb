"""Without a CUDA device Triton's interpreter runs the kernels in host memory."""

import pytest
import torch

from tests.triton_here import skip_unless_interpreted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run: the interpreter's host memory, or a device."""
    wanted = torch.device(request.param)
    if (wanted.type == "cuda") != torch.cuda.is_available():
        pytest.skip("no CUDA device here" if wanted.type == "cuda" else "kernels are compiled for the device")
    if wanted.type == "cpu":
        skip_unless_interpreted()
    return wanted
