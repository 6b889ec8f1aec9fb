"""`doctor`: what this machine has for serving a model, and what to do about what it lacks."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil

from services.stack import nats_server
from services.stack.models import SHIPPED, resolved
from services.stack.obstructions import DEFAULT_NATS_PORT, is_free, owner
from services.stack.rundir import RunDirectory
from shared.errors import ConfigError
from shared.model_files import check_model

_COMPILERS = ("c++", "g++", "clang++")
_LEAST_DISK_BYTES = 1_000_000_000
_BESIDE_WEIGHTS = 1.3
"""Memory of a worker over its weights, without KV."""
_VECTORS = ("amx_int8", "avx512_vnni", "avx512f", "avx2", "asimd")
_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice` is empty where nothing is to be done."""

    name: str
    found: str
    advice: str = ""
    is_fatal: bool = False
    """No stack starts as it is."""

    def __str__(self) -> str:
        mark = "no  " if self.is_fatal else "note" if self.advice else "ok  "
        return f"{mark}  {self.name:9} {self.found}" + (f": {self.advice}" if self.advice else "")


def examined(run: RunDirectory, model: str | None, port: int) -> Iterator[Finding]:
    """Look at this machine and its readiness for a stack with this model and HTTP port."""
    yield Finding("python", sys.version.split()[0])
    yield _processor()
    yield _compiler()
    yield _device()
    yield _nats()
    yield from _memory(resolved(model or SHIPPED))
    yield _disk(run.path)
    yield from _ports(run, port)
    yield _hub()


def _processor() -> Finding:
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    vectors = next((name for name in _VECTORS if name in flags), "no vector instructions that are known")
    return Finding("processor", f"{os.cpu_count()} cores, {vectors}")


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found:
        return Finding("compiler", found)
    advice = "install g++ for the fast way on a CPU (worker.attention=native); without it torch computes"
    return Finding("compiler", "none", advice)


def _device() -> Finding:
    is_there = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    if not is_there:
        return Finding("device", "no GPU is seen; workers compute on the CPU")
    try:
        import_module("services.worker.prerequisites").check_cuda()
    except ConfigError as error:
        return Finding("device", "a GPU is here", error.message.removeprefix("device cuda: "))
    return Finding("device", "a GPU is here, and torch is built for it: write --set worker.device=cuda")


def _nats() -> Finding:
    try:
        return Finding("bus", nats_server.binary())
    except ConfigError as error:
        return Finding("bus", "no nats-server", error.message, is_fatal=True)


def _memory(model: str) -> Iterator[Finding]:
    free_bytes = psutil.virtual_memory().available
    try:
        check_model(model)
    except ConfigError as error:
        yield Finding("model", model, error.message, is_fatal=True)
        return
    path = Path(model).expanduser()
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
    if not weights:
        yield Finding(
            "memory", f"{free_bytes / _GIGA:.1f} GB free; the model's size is known once it is here"
        )
        return
    found = f"{free_bytes / _GIGA:.1f} GB free, weights {weights / _GIGA:.2f} GB a worker"
    too_much = weights * _BESIDE_WEIGHTS > free_bytes
    advice = "choose a smaller model, fewer workers (--workers 1) or dtype bfloat16" if too_much else ""
    yield Finding("memory", found, advice, is_fatal=too_much)


def _disk(path: Path) -> Finding:
    folder = next(each for each in (path, *path.parents) if each.exists())
    free_bytes = shutil.disk_usage(folder).free
    advice = "make room, or name another folder with --run-dir" if free_bytes < _LEAST_DISK_BYTES else ""
    return Finding("disk", f"{free_bytes / _GIGA:.1f} GB free in {folder}", advice)


def _ports(run: RunDirectory, port: int) -> Iterator[Finding]:
    pid = run.holder()
    if pid is not None:
        yield Finding("stack", f"one runs from {run.path} (pid {pid}): `kvasir status` tells how it is")
        return
    for name, wanted, flag in (("HTTP", port, "--port"), ("NATS", DEFAULT_NATS_PORT, "--nats-port")):
        if is_free(wanted):
            yield Finding("port", f"{wanted} is free for {name}")
        else:
            advice = f"stop that, or start with {flag} 0" if name == "HTTP" else "another one will be taken"
            yield Finding("port", f"{wanted}, wanted for {name}, is taken by {owner(wanted)}", advice)


def _hub() -> Finding:
    if os.environ.get("HF_TOKEN"):
        return Finding("hub", "HF_TOKEN is set")
    return Finding("hub", "no HF_TOKEN: models that ask for a licence cannot be downloaded, others can")
