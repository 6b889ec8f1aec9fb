"""vLLM as a server to be compared with: how it is started, and the ways in which it may run.

Float32, one compute thread, chunked prefill, no prefix cache, as our side; which core a thread runs on is
`cores`' business.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from bench.kit.load import Target
from bench.kit.processes import ProcessTree
from bench.kit.provenance import ROOT
from bench.kit.stacks import Server, started
from services.stack.obstructions import free_port
from shared.errors import ConfigError

VLLM_BLOCK_TOKENS = 32


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


def start_vllm(
    run_dir: Path,
    model: Path,
    variant: VllmVariant,
    *,
    engine_core: int,
    context_tokens: int,
    max_sequences: int,
    kv_gib: int = 1,
    kv_blocks: int | None = None,
) -> Server:
    """`vllm serve` from its own virtual environment, its KV by bytes or by blocks of `VLLM_BLOCK_TOKENS`.

    Raises ConfigError when it is not set up.
    """
    port = free_port()
    argv = [str(vllm_binary()), "serve", str(model), "--served-model-name", model.name]
    argv += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", str(context_tokens), "--block-size", str(VLLM_BLOCK_TOKENS)]
    argv += [] if kv_blocks is None else ["--num-gpu-blocks-override", str(kv_blocks)]
    argv += ["--no-enable-prefix-caching", "--enable-chunked-prefill", "--max-num-seqs", str(max_sequences)]
    argv += [] if variant.compiled else ["--enforce-eager"]
    argv += ["--distributed-executor-backend", "uni" if variant.one_process else "mp"]
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("VLLM_")},
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(engine_core),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if variant.one_process else "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{vllm_binary().parent}:{os.environ.get('PATH', '')}",
    }
    tree = ProcessTree("vllm", argv, env, run_dir / f"vllm-{variant.name}.log", run_dir)
    return started(Server("vllm", tree, Target(port, model.name), variant.engine, {"variant": variant.name}))
