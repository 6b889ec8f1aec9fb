"""All operators under AddressSanitizer and UndefinedBehaviorSanitizer: the tests of this folder, which draw
shapes at random, run once more with a library that was compiled with both.

The compiler is a script that adds the flags, so that the library is built and found as any other is. The
sanitizer's own library has to be there before Python is: it is preloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine.native import build
from tests.stack.running import ROOT

HERE = Path(__file__).parent
OPERATORS = ("test_gemm.py", "test_llama.py", "test_library.py", "../test_sampler.py")
_FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
_DEADLINE_S = 1500.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1600),
    pytest.mark.skipif(
        sys.platform != "linux" or build.find_compiler() is None, reason="needs a C++ compiler, and Linux"
    ),
]


@pytest.fixture(scope="module")
def preloaded() -> str:
    """The sanitizer's library. Skips where the compiler has none."""
    compiler = build.find_compiler()
    assert compiler is not None
    command = [compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(found).is_absolute() or not Path(found).exists():
        pytest.skip(f"{compiler} comes without libasan.so")
    return found


@pytest.fixture(scope="module")
def sanitizing() -> Path:
    """A compiler of a name that stays, so that what it has built is found again."""
    script = build.BUILDS.parent / "sanitizing-c++"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {build.find_compiler()} "$@" {_FLAGS}\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("seed", [1, 2])
def test_no_operator_leaves_its_memory_whatever_the_shapes(
    sanitizing: Path, preloaded: str, seed: int
) -> None:
    env = {
        **os.environ,
        "CXX": str(sanitizing),
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    which = ["-m", "not slow and not gpu", f"--hypothesis-seed={seed}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-s", *which]
        + [str(HERE / name) for name in OPERATORS],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout.splitlines()[-1]
