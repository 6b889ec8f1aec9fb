"""Sides of the serve bench: the same KV bytes, one compute thread, no prefix cache.

`kvasir` trains its predictor on the lessons; only `oracle` gets the true lengths.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.kit.peers import VLLM_BLOCK_TOKENS, VllmVariant
from bench.kit.provenance import ROOT
from bench.kit.stacks import OFF, PLAIN, Server, start_stack
from shared.errors import InternalError

LENGTHS = "lengths"
MECHANISMS: dict[str, dict[str, object]] = {
    LENGTHS: {"worker.states_every": 16},
    "pie": {"worker.pie.enabled": True},
    "tiers": {"worker.prefix_cache.enabled": True},
    "relief": {"scheduler.relief": True},
    "everything": {
        "worker.pie.enabled": True,
        "worker.prefix_cache.enabled": True,
        "worker.lending.lend": True,
        "scheduler.relief": True,
    },
}
"""Additional settings of `kvasir`, by side. `lengths` predicts during decoding. Pie excludes the prefix
cache and borrowing (docs/pie.md), so `everything` is what one worker can combine."""
WITH_VLLM = ("tiers", "relief")
"""Mechanisms that work with engine vLLM."""
PEER, BASE, OURS, ORACLE = "vllm", "ours_vllm", "kvasir", "oracle"
BLOCK_TOKENS = 16
MAX_SEQUENCES = 64
_TRAINING_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Shape:
    """Settings shared by all sides."""

    model: Path
    kv_tokens: int
    """A multiple of both block sizes."""
    context_tokens: int
    engine_core: int
    run_dir: Path
    workers: int = 1
    """Workers of each of our sides; each has `kv_tokens`."""
    variant: VllmVariant | None = None
    """Variant of vLLM, if it is our workers' engine, too."""


@dataclass(frozen=True)
class Policy:
    """Settings that distinguish our sides."""

    name: str
    policy: str
    predictor: str
    knowledge: Path | None = None
    """`regressor`: the directory of its versions; `oracle`: the file of true lengths."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Additional settings."""


def kv_tokens_for(mean_request_tokens: float, requests: int) -> int:
    """Return KV tokens in whole blocks of either side."""
    return max(1, round(mean_request_tokens * requests / VLLM_BLOCK_TOKENS)) * VLLM_BLOCK_TOKENS


def start_ours(shape: Shape, side: Policy) -> Server:
    """Start a stack without mechanisms that use other memory, except for the side's `more`. Raises
    InternalError if it does not start."""
    settings: dict[str, object] = {
        **OFF,
        **PLAIN,
        **_engine(shape),
        "scheduler.policy": side.policy,
        "scheduler.max_batch_sequences": MAX_SEQUENCES,
        "predictor.model": side.predictor,
        "predictor.learn": False,
        **side.more,
    }
    if side.knowledge is not None:
        where = "trace" if side.predictor == "oracle" else "state_dir"
        settings[f"predictor.{where}"] = side.knowledge
    folder = shape.run_dir / side.name
    return start_stack(folder, settings, name=side.name, model=shape.model, workers=shape.workers)


def _engine(shape: Shape) -> dict[str, object]:
    if shape.variant is None:
        return {"worker.block_tokens": BLOCK_TOKENS, "worker.kv_blocks": shape.kv_tokens // BLOCK_TOKENS}
    return {
        "worker.engine": "vllm",
        "worker.block_tokens": VLLM_BLOCK_TOKENS,
        "worker.kv_blocks": shape.kv_tokens // VLLM_BLOCK_TOKENS,
        "worker.vllm.eager": not shape.variant.compiled,
        "worker.vllm.max_rows": MAX_SEQUENCES,
    }


def train_regressor(lessons: Path, folder: Path) -> str:
    """Train the first version in `folder` on rows of prompt and length; return the trainer's message.

    Raises InternalError if it fails.
    """
    argv = [sys.executable, "-m", "services.predictor", "train", "--model", "regressor", "--json"]
    argv += ["--data", str(lessons), "--out", str(folder), "--deadline-s", str(_TRAINING_DEADLINE_S)]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=_TRAINING_DEADLINE_S + 60, check=False
    )
    if done.returncode != 0:
        raise InternalError(f"the predictor could not be trained: {done.stderr[-500:]}")
    return done.stdout.strip()
