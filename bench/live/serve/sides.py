"""The sides of the serve bench and how each is started: the same bytes of KV, one compute thread, no prefix
cache.

`kvasir` learns its predictor from the lessons; `oracle` is told the true lengths, nobody else is.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.kit.mechanisms import OFF
from bench.kit.peers import VLLM_BLOCK_TOKENS, VllmVariant, start_vllm
from bench.kit.provenance import ROOT
from bench.kit.stacks import PLAIN, Server, start_stack
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
"""What `kvasir` may have besides, by the side's name. `lengths` are learned while answering. Pie leaves the
prefix cache out and excludes borrowing (docs/pie.md), so `everything` is what one worker can have at once."""
WITH_VLLM = ("tiers", "relief")
"""Those that workers can have whose engine is vLLM."""
PEER, BASE, OURS, ORACLE = "vllm", "ours_vllm", "kvasir", "oracle"
BLOCK_TOKENS = 16
MAX_SEQUENCES = 64
_TRAINING_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Shape:
    """What all sides have in common."""

    model: Path
    kv_tokens: int
    """A multiple of both block sizes."""
    context_tokens: int
    engine_core: int
    run_dir: Path
    workers: int = 1
    """Of each of our sides; each has that much KV."""
    variant: VllmVariant | None = None
    """How vLLM runs where it is our workers' engine, too."""


@dataclass(frozen=True)
class Policy:
    """What distinguishes one of our sides from another."""

    name: str
    policy: str
    predictor: str
    knowledge: Path | None = None
    """`regressor`: the directory of its versions; `oracle`: the file of true lengths."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Settings of its own."""


def kv_tokens_for(mean_request_tokens: float, requests: int) -> int:
    """Whole blocks of either side."""
    return max(1, round(mean_request_tokens * requests / VLLM_BLOCK_TOKENS)) * VLLM_BLOCK_TOKENS


def start_ours(shape: Shape, side: Policy) -> Server:
    """A stack without what takes memory from elsewhere, but for `more` of its side: all have the same bytes
    of KV. Raises InternalError when it does not come up."""
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


def start_peer(shape: Shape, variant: VllmVariant) -> Server:
    """vLLM with the same KV. Raises ConfigError when it is not set up."""
    return start_vllm(
        shape.run_dir,
        shape.model,
        variant,
        engine_core=shape.engine_core,
        context_tokens=shape.context_tokens,
        max_sequences=MAX_SEQUENCES,
        kv_blocks=shape.kv_tokens // VLLM_BLOCK_TOKENS + 1,  # of which it uses all but block 0
    )


def train_regressor(lessons: Path, folder: Path) -> str:
    """Makes its first version in `folder` from rows of prompt and length; what the trainer says of it.

    Raises InternalError when it fails.
    """
    argv = [sys.executable, "-m", "services.predictor", "train", "--model", "regressor", "--json"]
    argv += ["--data", str(lessons), "--out", str(folder), "--deadline-s", str(_TRAINING_DEADLINE_S)]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=_TRAINING_DEADLINE_S + 60, check=False
    )
    if done.returncode != 0:
        raise InternalError(f"the predictor could not be trained: {done.stderr[-500:]}")
    return done.stdout.strip()
