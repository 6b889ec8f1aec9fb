"""A stack for this bench: one worker with a core of its own, everything else on another."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.kit.load import Target, answers
from bench.kit.processes import ProcessTree, free_port
from bench.kit.provenance import ROOT
from shared.errors import InternalError

_START_DEADLINE_S = 180.0
_STATUS_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Stack:
    """One that answers."""

    side: ProcessTree
    target: Target
    run_dir: Path

    def gateway(self) -> psutil.Process:
        """Raises InternalError when there is none."""
        return psutil.Process(self._pid("gateway-0"))

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by child; the worker's engine apart from the rest of it."""
        used: dict[str, float] = {}
        for name, pid in self._children().items():
            for thread in psutil.Process(pid).threads():
                part = "worker-0 engine" if name == "worker-0" and thread.id != pid else name
                used[part] = used.get(part, 0.0) + thread.user_time + thread.system_time
        return used

    def engine_time_s(self) -> tuple[float, float]:
        """Seconds since its start that the engine computed, and that it did not although there was work."""
        details = self.details("engine_s")
        return float(details["engine_s"]), float(details["between_steps_s"])

    def details(self, key: str) -> dict[str, Any]:
        """That part of the stack's status which has `key`. Raises InternalError when there is none."""
        argv = [sys.executable, "-m", "services", "status", "--json", "--run-dir", str(self.run_dir)]
        done = subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=_STATUS_DEADLINE_S, check=False
        )
        details = _find(json.loads(done.stdout), key) if done.returncode == 0 else None
        if details is None:
            raise InternalError(f"the stack's status does not tell {key}: {done.stderr[-300:]}")
        return details

    def _pid(self, name: str) -> int:
        try:
            return self._children()[name]
        except KeyError:
            raise InternalError(f"the stack has no {name}") from None

    def _children(self) -> dict[str, int]:
        state = json.loads((self.run_dir / "state.json").read_text())
        return {child["name"]: child["pid"] for child in state["children"] if child["pid"]}


def start(
    model: Path,
    engine_core: int,
    kv_blocks: int,
    max_sequences: int,
    run_dir: Path,
    more_settings: Mapping[str, object] | None = None,
    workers: int = 1,
) -> Stack:
    """Started by a process that is bound to the core that everything but the engines is to have."""
    port = free_port()
    settings = {
        "worker.threads": 1,
        "worker.prefix_cache.enabled": "false",
        "worker.cores": f"[{engine_core}]",
        "worker.kv_blocks": kv_blocks,
        "scheduler.max_batch_sequences": max_sequences,
        "scheduler.policy": "vllm",
        **(more_settings or {}),
    }
    argv = [sys.executable, "-m", "services", "up", "--run-dir", str(run_dir), "--port", str(port)]
    argv += ["--nats-port", str(free_port()), "--workers", str(workers), "--model", str(model)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    side = ProcessTree("kvasir", argv, _environment(), run_dir.with_suffix(".log"), ROOT)
    try:
        side.await_(lambda: answers(Target(port, model.name), "/ready"), _START_DEADLINE_S)
    except BaseException:
        side.end()
        raise
    key = str(json.loads((run_dir / "credentials.json").read_text())["api_key"])
    return Stack(side, Target(port, model.name, key), run_dir)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _find(document: object, key: str) -> dict[str, Any] | None:
    """The object, however deep in a JSON document, that has `key`."""
    if isinstance(document, dict):
        if key in document:
            return document
        document = list(document.values())
    if isinstance(document, list):
        return next((found for one in document if (found := _find(one, key)) is not None), None)
    return None
