"""Whether the Triton that is installed runs kernels in host memory."""

from importlib.metadata import version

import pytest


def skip_unless_interpreted() -> None:
    """Call it before kernels run without a device: skips the test where the interpreter cannot."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("this Triton's interpreter takes arrays of one element for scalars, NumPy no longer does")
