"""The sides of the serve bench and how each is started: the same bytes of KV, one compute thread, no prefix
cache.

`kvasir` learns its predictor from the lessons; `oracle` is told the true lengths, nobody else is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.kit.load import Target, answers
from bench.kit.peers import VLLM_BLOCK_TOKENS, Server, VllmVariant, vllm_binary
from bench.kit.processes import ProcessTree, free_port
from bench.kit.provenance import ROOT
from shared.errors import InternalError

MECHANISMS: dict[str, dict[str, object]] = {
    "pie": {"worker.pie.enabled": "true"},
    "tiers": {"worker.prefix_cache.enabled": "true"},
    "relief": {"scheduler.relief": "true"},
    "everything": {
        "worker.pie.enabled": "true",
        "worker.prefix_cache.enabled": "true",
        "worker.lending.lend": "true",
        "scheduler.relief": "true",
    },
}
"""What `kvasir` may have besides, by the side's name. Pie leaves the prefix cache out and excludes borrowing
(docs/pie.md), so `everything` is what one worker can have at once."""
PEER, BASE, OURS, ORACLE = "vllm", "ours_vllm", "kvasir", "oracle"
BLOCK_TOKENS = 16
MAX_SEQUENCES = 64
_START_DEADLINE_S = 240.0
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
    """`python -m services up` with one worker. Raises InternalError when it does not come up."""
    port, run_dir = free_port(), shape.run_dir / side.name
    settings: dict[str, object] = {
        "worker.threads": 1,
        "worker.prefix_cache.enabled": "false",
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.kv_blocks": shape.kv_tokens // BLOCK_TOKENS,
        "scheduler.policy": side.policy,
        "scheduler.max_batch_sequences": MAX_SEQUENCES,
        "predictor.model": side.predictor,
        "predictor.learn": "false",
        **side.more,
    }
    if side.knowledge is not None:
        where = "trace" if side.predictor == "oracle" else "state_dir"
        settings[f"predictor.{where}"] = side.knowledge
    argv = [sys.executable, "-m", "services", "up", "--run-dir", str(run_dir), "--port", str(port)]
    argv += ["--nats-port", str(free_port()), "--workers", "1", "--model", str(shape.model)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = ProcessTree(side.name, argv, env, shape.run_dir / f"{side.name}.log", ROOT)
    try:
        process.await_(lambda: answers(Target(port, shape.model.name), "/ready"), _START_DEADLINE_S)
        key = str(json.loads((run_dir / "credentials.json").read_text())["api_key"])
    except BaseException:
        process.end()
        raise
    told = {"policy": side.policy, "predictor": side.predictor}
    return Server(side.name, process, Target(port, shape.model.name, key), "worker-0", told)


def start_peer(shape: Shape, variant: VllmVariant) -> Server:
    """`vllm serve`, chunked prefill on. Raises ConfigError when it is not set up."""
    port = free_port()
    argv = [str(vllm_binary()), "serve", str(shape.model), "--served-model-name", shape.model.name]
    argv += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", str(shape.context_tokens), "--block-size", str(VLLM_BLOCK_TOKENS)]
    argv += ["--num-gpu-blocks-override", str(shape.kv_tokens // VLLM_BLOCK_TOKENS)]
    argv += ["--no-enable-prefix-caching", "--enable-chunked-prefill", "--max-num-seqs", str(MAX_SEQUENCES)]
    argv += [] if variant.compiled else ["--enforce-eager"]
    argv += ["--distributed-executor-backend", "uni" if variant.one_process else "mp"]
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("VLLM_")},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(shape.engine_core),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if variant.one_process else "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{vllm_binary().parent}:{os.environ.get('PATH', '')}",
    }
    process = ProcessTree(PEER, argv, env, shape.run_dir / f"vllm-{variant.name}.log", shape.run_dir)
    target = Target(port, shape.model.name)
    try:
        process.await_(lambda: answers(target), _START_DEADLINE_S)
    except BaseException:
        process.end()
        raise
    return Server(PEER, process, target, variant.engine, {"variant": variant.name})


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
