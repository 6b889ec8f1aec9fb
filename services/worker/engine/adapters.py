"""Checks of LoRA adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.*`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shared.errors import ConfigError
from shared.model_files import read_json

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for."""


def folder_of(path: str) -> Path:
    """Return an adapter's folder."""
    return Path(path).expanduser()


def largest_rank(adapters: Mapping[str, str]) -> int:
    """Return the smallest of vLLM's ranks that holds all adapters. Raises ConfigError for a folder that is no
    adapter, and for an adapter whose rank is too large."""
    most = 1
    for name, path in adapters.items():
        config = adapter_config(name, path)
        ranks = [config.get("r"), *dict(config.get("rank_pattern") or {}).values()]
        if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
            raise _unfit(name, f"the adapter_config.json in {path} gives no rank `r`", "name a LoRA adapter")
        most = max(most, *ranks)
        if most > _RANKS[-1]:
            advice = "train it with a smaller r, or merge it into the model"
            raise _unfit(name, f"its rank is {most}, and vLLM's largest is {_RANKS[-1]}", advice)
    return next(rank for rank in _RANKS if rank >= most)


def adapter_config(name: str, path: str) -> dict[str, Any]:
    """Return an adapter's configuration. Raises ConfigError if the folder is no adapter."""
    folder = folder_of(path)
    for file in ("adapter_config.json", "adapter_model.*"):
        if not any(folder.glob(file)):
            raise _unfit(name, f"{path} has no {file}", "name a folder that PEFT's save_pretrained wrote")
    return read_json(folder / "adapter_config.json")


def _unfit(name: str, problem: str, advice: str) -> ConfigError:
    return ConfigError(f"adapter {name!r}: {problem}: {advice}, or leave it out", param="vllm.adapters")
