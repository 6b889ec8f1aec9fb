"""An experiment file: a grid in YAML, checked before anything runs.

Every list in `grid` is an axis; a cell is one choice of each. A policy, predictor, placement or eviction
order is the name of an installed one, or `FILE.py:CLASS`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from services.placement.policy import LIVE_PACKINGS
from services.placement.policy import create as create_placement
from services.predictor.models import find_model
from services.scheduler.policy import check_policy, find_policy
from services.scheduler.policy.contract import PolicySettings
from services.worker.kv.core.eviction import order_maker
from shared.errors import ConfigError
from shared.plugins import absolute, is_file, label
from sim.case import Machine
from sim.predictors import find_predictor
from sim.routers import find_router

PARTS = ("policy", "predictor", "placement", "eviction")
"""Axes of exchangeable parts."""
AXES = (*PARTS, "trace", "rate", "seed")
LIVE_TRACE = "chats"
"""Live requests are chats for the bundled model."""
LEAST_TURNS = 3
"""Least turns of a live cell; with fewer there is no interval."""
_DEFAULTS: dict[str, list[Any]] = {
    "policy": ["vllm"],
    "predictor": ["histogram"],
    "placement": ["best_fit"],
    "eviction": ["frequent"],
    "trace": ["sharegpt"],
    "rate": [1.0],
    "seed": [0],
}
_TOP = {
    "name", "mode", "grid", "requests", "workers", "machine", "options", "settings", "slo_scale",
    "max_tokens", "turns", "made", "figures",
}  # fmt: skip
"""`made` and `figures` are in a file that a run has written, to be cited."""


@dataclass(frozen=True)
class GridCell:
    """One point of the grid."""

    policy: str
    predictor: str
    placement: str
    eviction: str
    trace: str
    rate: float
    seed: int

    def choices(self) -> dict[str, Any]:
        return {axis: getattr(self, axis) for axis in AXES}


@dataclass(frozen=True)
class Experiment:
    """Contents of an experiment file."""

    name: str
    mode: str
    """`simulator` or `live`."""
    cells: tuple[GridCell, ...]
    requests: int
    workers: int
    machine: Machine
    """Machine of the simulator."""
    options: Mapping[str, Mapping[str, Any]]
    """Options by policy."""
    settings: Mapping[str, Any]
    """Further `SECTION.KEY` settings of a live stack, such as another model."""
    slo_scale: float
    max_tokens: int
    """Answer limit of live requests."""
    turns: int = 1
    """Runs of each live cell, in turn with the others."""
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Figures of the cited run, by folder of a cell; empty if the file is of no run."""

    def folder(self, cell: GridCell) -> str:
        """Return the name of the cell's run directory."""
        files = [name for part in PARTS if is_file(name := getattr(cell, part))]
        fixed = {
            "mode": self.mode,
            "requests": self.requests,
            "workers": self.workers,
            "machine": {one.name: getattr(self.machine, one.name) for one in fields(self.machine)},
            "options": dict(self.options.get(cell.policy, {})),
            "settings": dict(self.settings),
            "slo_scale": self.slo_scale,
            "max_tokens": self.max_tokens,
            "turns": self.turns,
            "files": [Path(absolute(name).rpartition(":")[0]).read_text() for name in files],
        }
        whole = json.dumps([cell.choices(), fixed], sort_keys=True, default=str)
        digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
        parts = "-".join(label(getattr(cell, part)).replace(":", ".") for part in PARTS)
        return f"{parts}-{Path(cell.trace).stem}-{cell.rate:g}-s{cell.seed}-{digest}"


def read_experiment(path: Path) -> Experiment:
    """Read an experiment. Raises ConfigError with the key and what to write."""
    try:
        content = _content(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="experiment") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} is no mapping; write `grid:` and lists below it", param="experiment")
    _refuse_unknown(content, _TOP, "key")
    mode = content.get("mode", "simulator")
    if mode not in ("simulator", "live"):
        raise ConfigError(f"mode {mode!r}; write simulator or live", param="mode")
    machine = _machine(content.get("machine") or {})
    return Experiment(
        name=str(content.get("name", path.stem)),
        mode=mode,
        cells=_cells(content.get("grid") or {}, mode, machine),
        requests=_whole(content, "requests", 500),
        workers=_whole(content, "workers", 1),
        machine=machine,
        options=_options(content.get("options") or {}),
        settings=content.get("settings") or {},
        slo_scale=float(content.get("slo_scale", 2.0)),
        max_tokens=_whole(content, "max_tokens", 256),
        turns=_turns(content, mode),
        figures=content.get("figures") or {},
    )


def _content(path: Path) -> Any:
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def write_cited(file: Path, source: Path, ran: Experiment, made: Mapping[str, Any]) -> None:
    """Write what `ran`, what it was `made` with, and its figures, as a file that can be run again."""
    content = _content(source) | {"name": ran.name, "requests": ran.requests, "made": made}
    file.write_text(json.dumps(content | {"figures": ran.figures}, indent=2, default=str) + "\n")


def _turns(content: Mapping[str, Any], mode: str) -> int:
    if mode == "simulator" and "turns" in content:
        raise ConfigError("turns is for mode: live; a simulation gives the same each time", param="turns")
    turns = _whole(content, "turns", LEAST_TURNS if mode == "live" else 1)
    if mode == "live" and turns < LEAST_TURNS:
        raise ConfigError(f"turns is {turns}; write at least {LEAST_TURNS}", param="turns")
    return turns


def _refuse_unknown(given: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"unknown {what} {', '.join(unknown)}; known: {', '.join(sorted(known))}", param=what
        )


def _whole(content: Mapping[str, Any], key: str, default: int) -> int:
    value = content.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; write a whole number above 0", param=key)
    return value


def _machine(given: Mapping[str, Any]) -> Machine:
    _refuse_unknown(given, {one.name for one in fields(Machine)}, "machine setting")
    return Machine(**given)


def _options(given: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Check the options of every policy on that policy."""
    for policy, options in given.items():
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"options.{policy} is {options!r}; write OPTION: VALUE below it", param="options"
            )
        check_policy(policy, PolicySettings(options=options))
    return given


def _cells(grid: Mapping[str, Any], mode: str, machine: Machine) -> tuple[GridCell, ...]:
    _refuse_unknown(grid, set(AXES), "axis")
    axes = {axis: grid.get(axis, _DEFAULTS[axis]) for axis in AXES}
    if mode == "live":
        axes["trace"] = grid.get("trace", [LIVE_TRACE])
        if axes["trace"] != [LIVE_TRACE]:
            text = f"live requests are {LIVE_TRACE} of Tiny Chat: leave grid.trace out"
            raise ConfigError(text, param="trace")
    elif "eviction" in grid and not machine.cache_blocks:
        text = "the simulator evicts only where machine.cache_blocks says how many blocks a worker keeps"
        raise ConfigError(text, param="eviction")
    by_trace = axes["rate"] if isinstance(axes["rate"], Mapping) else None
    if by_trace is not None:
        axes["rate"] = _of_all_traces(by_trace, axes["trace"])
    for axis, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{axis} is {values!r}; write a list", param=axis)
    find = _SIMULATED if mode == "simulator" else _LIVE
    for part in PARTS:
        for name in axes[part]:
            find[part](str(name))
    for rate in axes["rate"]:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
            raise ConfigError(f"rate {rate!r}; write requests per second above 0", param="rate")
    cells = (GridCell(*values) for values in product(*(axes[axis] for axis in AXES)))
    return tuple(cell for cell in cells if by_trace is None or cell.rate in by_trace[cell.trace])


def _of_all_traces(rates: Mapping[str, Any], traces: Any) -> list[Any]:
    """Return all rates that occur, in order, if each trace has its own."""
    known = traces if isinstance(traces, list) else []
    if set(rates) != set(known):
        raise ConfigError(
            f"grid.rate has rates for {', '.join(map(str, rates))}; write a list, or one for each trace: "
            f"{', '.join(map(str, known))}",
            param="rate",
        )
    for trace, values in rates.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.rate.{trace} is {values!r}; write a list", param="rate")
    return list(dict.fromkeys(rate for values in rates.values() for rate in values))


def _find_live_placement(name: str) -> None:
    if name not in LIVE_PACKINGS:
        create_placement(name)


_SIMULATED: Mapping[str, Callable[[str], object]] = {
    "policy": find_policy,
    "predictor": find_predictor,
    "placement": find_router,
    "eviction": order_maker,
}
"""Checks by part; each raises ConfigError for an unknown name."""
_LIVE: Mapping[str, Callable[[str], object]] = {
    **_SIMULATED,
    "predictor": find_model,
    "placement": _find_live_placement,
}
