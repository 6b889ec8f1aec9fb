"""Without a device the kernels compile for one: with wide asynchronous copies and tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")
ROOT = Path(__file__).parents[5]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of one program at most, by compute capability."""


@pytest.mark.parametrize("capability", sorted(SHARED_BYTES))
def test_kernels_compile_with_wide_copies_and_tensor_cores(tmp_path: Path, capability: int) -> None:
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    environment.pop("TRITON_INTERPRET", None)  # A process of its own: here kernels may be interpreted.
    module = "tests.services.worker.engine.gpu.compiling"
    done = subprocess.run(
        [sys.executable, "-m", module, str(capability)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    copying = {"fetch", "point", "account"}
    assert set(compiled) == {"decode", "prefill", "decode fp32", "merge", "write", *copying}
    for name, found in compiled.items():
        assert found["shared_bytes"] <= SHARED_BYTES[capability], name
    for name in ("decode", "prefill"):
        found = compiled[name]
        # Of K and of V: the tiles that are fetched ahead of the loop, and the one that each round fetches.
        copies, due = found["wide_copies"], found["tile_copies"]
        assert copies >= 2 * due and copies % due == 0, f"{name}: {copies} copies of 16 bytes, {due} a tile"
        assert not found["narrow_loads"], f"{name}: keys or values come {found['narrow_loads']} × 2 bytes"
        assert compiled[name]["tensor_cores"], f"{name}: products without tensor cores"
