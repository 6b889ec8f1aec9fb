"""Triton's interpreter in place of a Triton that compiles for CPUs, which the wheels here do not have.

`python -m tests.vllm.interpreted MODULE ARGUMENT…` runs the module so. vLLM's model runner V2 then runs whole
on a CPU: its kernels as they are written, in Python and slowly; attention and matrices by vLLM's kernels for
CPUs, as with V1.
"""

import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared
    from triton.backends import backends

    known: Any = backends
    known.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False)))
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
