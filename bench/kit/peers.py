"""vLLM as the peer server: how to start it, and its variants.

It runs in float32 with chunked prefill and, unless asked otherwise, one compute thread and no prefix cache,
like our side. `cores` pins its threads. `start_bare_vllm` leaves it its defaults.
"""

import os
import sys
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
    """A configuration of vLLM: the user's choices that change its speed on a CPU."""

    compiled: bool = False
    one_process: bool = True
    """Scheduler and model in one process. With two, vLLM's default, the scheduler polls for results and
    keeps the core of the HTTP server and the client busy."""

    @property
    def engine(self) -> str:
        """Start of the name of the process that runs the model."""
        return "VLLM::Engine" if self.one_process else "VLLM::Worker"

    @property
    def name(self) -> str:
        return f"{'compiled' if self.compiled else 'eager'}-{'uni' if self.one_process else 'mp'}"


VLLM_VARIANTS = {
    variant.name: variant
    for variant in (VllmVariant(compiled, one) for one in (True, False) for compiled in (False, True))
}
FASTEST = "compiled-uni"
"""The fastest variant on one core (docs/benchmarks/engine.md)."""


def vllm_serve(device: str) -> tuple[list[str], dict[str, str]]:
    """Return the command `vllm serve` for a device, cuda or cpu, and its environment: with this Python and
    the folders in `KVASIR_VLLM_PATH`, or with `.venv-vllm`. Raises ConfigError without a vLLM for it."""
    folders, venv = os.environ.get("KVASIR_VLLM_PATH", ""), ROOT / ".venv-vllm"
    sites = [*map(Path, folders.split(":"))] if folders else [*venv.glob("lib/python3*/site-packages")]
    is_for_cpus = any(any(site.glob("vllm*cpu*.dist-info")) for site in sites)
    if is_for_cpus != (device == "cpu") or not any((site / "vllm").is_dir() for site in sites):
        how = "run `make setup-vllm`" if device == "cpu" else "install it in a virtual environment .venv-vllm"
        raise ConfigError(f"no vLLM for {device}: {how}, or set KVASIR_VLLM_PATH, now {folders!r}")
    env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", **os.environ}  # that would be compiled
    env["PATH"] = f"{venv / 'bin'}:{env.get('PATH', '')}"
    if folders:  # without what the other commands import
        env["PYTHONPATH"] = f"{folders}:{env.get('PYTHONPATH', '')}"
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"], env
    return [str(venv / "bin" / "vllm"), "serve"], env


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
    threads: int = 1,
    caches: bool = False,
    dtype: str = "float32",
) -> Server:
    """Start `vllm serve` from its own virtual environment, with KV in GiB or in blocks of
    `VLLM_BLOCK_TOKENS`. It computes on `threads` cores from `engine_core` on; `caches`: prefixes.

    Raises ConfigError if vLLM is not set up.
    """
    (serve, env), port = vllm_serve("cpu"), free_port()
    argv = [*serve, str(model), "--served-model-name", model.name]
    argv += ["--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--max-model-len", str(context_tokens), "--block-size", str(VLLM_BLOCK_TOKENS)]
    argv += [] if kv_blocks is None else ["--num-gpu-blocks-override", str(kv_blocks)]
    argv += ["--enable-chunked-prefill", "--enable-prompt-tokens-details"]
    argv += ["--max-num-seqs", str(max_sequences)]
    argv += ["--enable-prefix-caching" if caches else "--no-enable-prefix-caching"]
    argv += [] if variant.compiled else ["--enforce-eager"]
    argv += ["--distributed-executor-backend", "uni" if variant.one_process else "mp"]
    env = {
        **{key: value for key, value in env.items() if not key.startswith("VLLM_")},
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(engine_core, engine_core + threads))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if variant.one_process else "1",
        "OMP_NUM_THREADS": str(threads),
    }
    tree = ProcessTree("vllm", argv, env, run_dir / f"vllm-{variant.name}.log", run_dir)
    return started(Server("vllm", tree, Target(port, model.name), variant.engine, {"variant": variant.name}))


def start_bare_vllm(run_dir: Path, model: Path, device: str, dtype: str, within_s: float) -> Server:
    """Start `vllm serve` with its defaults. Raises ConfigError without vLLM, InternalError if it is late."""
    (argv, env), port = vllm_serve(device), free_port()
    argv += [str(model), "--served-model-name", model.name, "--dtype", dtype]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--enforce-eager"] if device == "cpu" else []  # its compiler takes minutes there
    tree = ProcessTree("vllm", argv, env, run_dir / "vllm.log", run_dir)
    return started(Server("vllm", tree, Target(port, model.name)), within_s=within_s)
