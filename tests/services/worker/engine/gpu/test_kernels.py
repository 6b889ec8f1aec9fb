"""Without a device the kernels compile for one: with wide asynchronous copies and tensor cores.

`python -m tests.services.worker.engine.gpu.test_kernels 90` compiles them for a compute capability and prints
what came of it as JSON."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.engine.gpu import kernels
from services.worker.engine.gpu.attention import pool_shape
from services.worker.engine.gpu.spans import DECODE_ROWS, PREFILL_ROWS

Q_HEADS, KV_HEADS, DIM, BLOCK_TOKENS = 32, 8, 128, 16
WARPS, STAGES = 4, 3
ARRAYS = "first_row first_position table_start table_position key_end blocks tile_span tile_row".split()
TYPES = dict.fromkeys(ARRAYS, "*i32") | {
    "lse": "*fp32", "partial": "*fp32", "partial_lse": "*fp32", "slots": "*i64", "query_stride": "i32",
    "key_stride": "i32", "value_stride": "i32", "scaling": "fp32", "softcap": "fp32",
    "splits": "i32", "numbers": "*i32", "raw": "*i32", "pointed": "*i32", "stamps": "*i64", "sums": "*i64",
    "layer": "i32",
}  # fmt: skip
FETCHED = {
    "LAYERS": 16, "DEVICE_BLOCKS": 96, "KEY_WORDS": 2048, "VALUE_WORDS": 2048, "LANES": 1024, "PROGRAMS": 16,
    "IS_TIMED": True,
}  # fmt: skip
POINTED = {"DEVICE_BLOCKS": 96, "LANES": 1024, "PROGRAMS": 16}
ACCOUNTED = {"LAYERS": 28, "LAYER_LANES": 32}


def compiled(
    kernel: Any, capability: int, data: str, constants: dict[str, Any], **options: int
) -> dict[str, Any]:
    """`data` is the type of pools, queries and outputs, as Triton writes it."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else TYPES.get(name, f"*{data}") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in ARRAYS and (types[name].startswith("*") or name.endswith("_stride"))
    }
    source = ASTSource(kernel, types, constants, aligned)
    made: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "shared_bytes": made.metadata.shared,
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)),
        "narrow_loads": len(re.findall(r"ld\.global[\w.:]*\.[bus](?:8|16)\b", ptx)),
        "tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
    }


def attending(capability: int, dtype: torch.dtype, data: str, rows: int) -> dict[str, Any]:
    k_pool = torch.empty(1, KV_HEADS, DIM, BLOCK_TOKENS, dtype=dtype)
    v_pool = torch.empty(1, KV_HEADS, BLOCK_TOKENS, DIM, dtype=dtype)
    constants: dict[str, Any] = {"HAS_SOFTCAP": True, "WINDOW": 4096, "WIDEN": False}
    constants |= {
        **pool_shape(k_pool, v_pool),
        "Q_HEADS": Q_HEADS,
        "TILE_ROWS": rows,
        "TILE_TOKENS": rows * KV_HEADS // Q_HEADS,
    }
    made = compiled(kernels.attend_kernel, capability, data, constants, num_warps=WARPS, num_stages=STAGES)
    tile_bytes = constants["TILE_KEYS"] * 2 * DIM * dtype.itemsize
    return made | {"tile_copies": tile_bytes // (WARPS * 32 * 16)}


def main() -> None:
    capability = int(sys.argv[1])
    k_pool = torch.empty(1, KV_HEADS, DIM, BLOCK_TOKENS)
    shape = pool_shape(k_pool, torch.empty(1, KV_HEADS, BLOCK_TOKENS, DIM))
    written = {key: value for key, value in shape.items() if key != "TILE_KEYS"}
    merged = {key: shape[key] for key in ("VALUE_DIM", "VALUE_LANES")}
    merged |= {"TILE_TOKENS": 1, "Q_HEADS": Q_HEADS, "SPLITS": 64}
    found = {
        "decode": attending(capability, torch.bfloat16, "bf16", DECODE_ROWS),
        "prefill": attending(capability, torch.bfloat16, "bf16", PREFILL_ROWS),
        "decode fp32": attending(capability, torch.float32, "fp32", DECODE_ROWS),
        "merge": compiled(kernels.merge_kernel, capability, "bf16", merged, num_warps=4),
        "write": compiled(kernels.write_kernel, capability, "bf16", written, num_warps=1),
        "fetch": compiled(kernels.fetch_layer_kernel, capability, "i64", FETCHED, num_warps=8),
        "point": compiled(kernels.point_kernel, capability, "i32", POINTED, num_warps=4),
        "account": compiled(kernels.account_kernel, capability, "i64", ACCOUNTED, num_warps=1),
    }
    print(json.dumps(found))


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
    module = "tests.services.worker.engine.gpu.test_kernels"
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


if __name__ == "__main__":
    main()
