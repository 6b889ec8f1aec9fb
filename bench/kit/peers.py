"""How each side is started as an HTTP server on one checkpoint. Knows the commands, not what is measured.

Both get the same bytes of KV, float32, one compute thread, chunked prefill and no prefix cache. Which core a
thread runs on is `pinning`'s business.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.kit.load import Target, answers
from bench.kit.processes import ProcessTree, free_port
from bench.kit.provenance import ROOT
from shared.errors import ConfigError

MAX_CONTEXT_TOKENS = 2048
VLLM_BLOCK_TOKENS = 32
_START_DEADLINE_S = 240.0
GIB = 1 << 30


@dataclass(frozen=True)
class Setup:
    """What the sides have in common."""

    model: Path
    kv_gib: int
    max_sequences: int
    engine_core: int
    run_dir: Path


@dataclass(frozen=True)
class Server:
    """A side that answers."""

    name: str
    side: ProcessTree
    target: Target
    engine: str
    """How the name of the process begins whose busiest thread is the engine."""
    describes: Mapping[str, object]
    """What distinguishes this side in the record of the run."""


StartSide = Callable[[Setup], Server]


def start_kvasir(setup: Setup) -> Server:
    """`python -m services up` with one worker; everything but KV size and batch limit as it ships."""
    port, run_dir = free_port(), setup.run_dir / "kvasir"
    settings = {
        "worker.threads": 1,
        "worker.prefix_cache.enabled": "false",
        "worker.kv_bytes": setup.kv_gib * GIB,
        "scheduler.policy": "vllm",
        "scheduler.max_batch_sequences": setup.max_sequences,
    }
    argv = [sys.executable, "-m", "services", "up", "--run-dir", str(run_dir), "--port", str(port)]
    argv += ["--nats-port", str(free_port()), "--workers", "1", "--model", str(setup.model)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    side = ProcessTree("kvasir", argv, env, setup.run_dir / "kvasir.log", ROOT)
    try:
        target = Target(port, setup.model.name)
        side.await_(lambda: answers(target, "/ready"), _START_DEADLINE_S)
    except BaseException:
        side.end()
        raise
    key = str(json.loads((run_dir / "credentials.json").read_text())["api_key"])
    return Server("kvasir", side, Target(port, setup.model.name, key), "worker-0", settings)


@dataclass(frozen=True)
class VllmVariant:
    """How vLLM runs: the choices that its users have and that change its speed on a CPU."""

    compiled: bool = False
    one_process: bool = True
    """Scheduler and model in one process. In two, as vLLM ships, the scheduler's polls for the model's
    answers and keeps the core busy on which the HTTP server and the client are to run."""

    @property
    def engine(self) -> str:
        """How the name of the process begins in which the model is computed."""
        return "VLLM::Engine" if self.one_process else "VLLM::Worker"

    @property
    def name(self) -> str:
        return f"{'compiled' if self.compiled else 'eager'}-{'uni' if self.one_process else 'mp'}"


VLLM_VARIANTS = tuple(VllmVariant(compiled, one) for one in (True, False) for compiled in (False, True))


def vllm_binary() -> Path:
    """Raises ConfigError when it is not set up."""
    binary = ROOT / ".venv-vllm" / "bin" / "vllm"
    if not binary.exists():
        raise ConfigError("vLLM is not set up here: run `make setup-vllm` first")
    return binary


def start_vllm(setup: Setup, variant: VllmVariant = VllmVariant()) -> Server:
    """`vllm serve` from its own virtual environment. Raises ConfigError when that is not there."""
    port = free_port()
    argv = [str(vllm_binary()), "serve", str(setup.model), "--served-model-name", setup.model.name]
    argv += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", str(MAX_CONTEXT_TOKENS), "--block-size", str(VLLM_BLOCK_TOKENS)]
    argv += ["--no-enable-prefix-caching", "--enable-chunked-prefill"]
    argv += ["--max-num-seqs", str(setup.max_sequences)]
    argv += [] if variant.compiled else ["--enforce-eager"]
    argv += ["--distributed-executor-backend", "uni" if variant.one_process else "mp"]
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("VLLM_")},
        "VLLM_CPU_KVCACHE_SPACE": str(setup.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(setup.engine_core),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if variant.one_process else "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{vllm_binary().parent}:{os.environ.get('PATH', '')}",
    }
    side = ProcessTree("vllm", argv, env, setup.run_dir / f"vllm-{variant.name}.log", setup.run_dir)
    target = Target(port, setup.model.name)
    try:
        side.await_(lambda: answers(target), _START_DEADLINE_S)
    except BaseException:
        side.end()
        raise
    return Server("vllm", side, target, variant.engine, {"variant": variant.name})
