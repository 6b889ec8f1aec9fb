"""`doctor`: what this machine has for serving a model, and what to do about what it lacks."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil

from services.stack import models, nats_server
from services.stack.obstructions import DEFAULT_NATS_PORT, is_free, owner
from services.stack.rundir import RunDirectory
from shared.errors import ConfigError
from shared.gguf_files import WEIGHTS, read_header
from shared.model_files import HubId, check_model, parameters_of, source_of

_COMPILERS = ("c++", "g++", "clang++")
_LEAST_DISK_BYTES = 1_000_000_000
_WORKER_BYTES, _OF_WEIGHTS = 200_000_000, 1.3
"""Memory of a worker without KV: its own, and its weights' over their size."""
_FLOAT_BYTES = 4
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


def examined(run: RunDirectory, model: str | None, workers: int, port: int) -> Iterator[Finding]:
    """Look at this machine and its readiness for a stack with this model (None: the default), number of
    workers and HTTP port."""
    yield Finding("python", sys.version.split()[0])
    yield _processor()
    yield _compiler()
    yield _device()
    yield _nats()
    yield from _model(model or models.default(), workers)
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


def _model(model: str | None, workers: int) -> Iterator[Finding]:
    if model is None:
        advice = f"./kvasir models pull {models.DEFAULT} fetches it (93 MB); until then Tiny Chat is served"
        yield Finding("model", f"{models.DEFAULT} is not here", advice)
        model = models.SHIPPED
    try:
        name, place = models.named(model)
        check_model(place)
        origin = source_of(place)
    except ConfigError as error:
        yield Finding("model", error.message, is_fatal=True)
        return
    if isinstance(origin, HubId):
        downloaded = _from_hub(origin)
        if isinstance(downloaded, Finding):
            yield downloaded
            return
        origin = downloaded
    yield Finding("model", f"{name} is here: {origin}")
    yield _memory(_weight_bytes(origin), workers)


def _from_hub(model: HubId) -> Path | Finding:
    """Return the folder to which a hub model was downloaded, or what to do about its absence."""
    from huggingface_hub import snapshot_download  # takes a second, only needed here
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.name, revision=model.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return Finding("model", f"{model} is not here", "the first start downloads it from the hub")


def _weight_bytes(folder: Path) -> int:
    """Return what the weights take in a worker: a GGUF file's as they are, others in float32."""
    if (folder / WEIGHTS).exists():
        return sum(tensor.size for tensor in read_header(folder / WEIGHTS).tensors.values())
    return parameters_of(folder) * _FLOAT_BYTES


def _memory(weight_bytes: int, workers: int) -> Finding:
    free_bytes, each = psutil.virtual_memory().available, _WORKER_BYTES + weight_bytes * _OF_WEIGHTS
    found = (
        f"{free_bytes / _GIGA:.1f} GB free, {workers} × {each / _GIGA:.2f} GB for workers without their KV"
    )
    if workers * each <= free_bytes:
        return Finding("memory", found)
    fitting = int(free_bytes // each)
    advice = f"start with --workers {fitting}" if fitting else "choose a smaller model, or a GGUF file"
    return Finding("memory", found, advice, is_fatal=True)


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
            yield Finding("port", f"{wanted}, wanted for {name}, is taken by {owner(wanted)[1]}", advice)


def _hub() -> Finding:
    if os.environ.get("HF_TOKEN"):
        return Finding("hub", "HF_TOKEN is set")
    return Finding("hub", "no HF_TOKEN: models that ask for a licence cannot be downloaded, others can")
