"""Checks before a stack starts that this machine supports a worker's settings. Imports nothing large."""

import fcntl
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from services.worker.core.settings import PrefixCacheConfig
from shared.errors import ConfigError

_MEGA = 1024 * 1024


def check_cuda() -> None:
    """Raise ConfigError if the installed torch is built without CUDA and without ROCm."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    text = Path(spec.origin).with_name("version.py").read_text()
    if re.search(r"^(?:cuda|hip)\b[^=\n]*=\s*'", text, re.MULTILINE) is None:
        found = re.search(r"^__version__ = '([^']*)'", text, re.MULTILINE)
        version = f" {found[1]}" if found else ""
        raise ConfigError(
            f"device cuda: the installed torch{version} is built without CUDA: install the other build with "
            "`make up TORCH=cuda`, or write worker.device=cpu",
            param="device",
        )


def check_disk(config: PrefixCacheConfig, instance: str) -> None:
    """Raise ConfigError if this instance could not open its disk tier."""
    if not config.disk_mb:
        return
    folder = Path(config.disk_path)
    file, wanted_bytes = folder / f"{instance}.kv", config.disk_mb * _MEGA
    is_new = not file.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free_bytes = shutil.disk_usage(folder).free + os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
            if is_new:
                file.unlink()
    except BlockingIOError:
        raise _no_disk(f"another process has {file} open", "name another prefix_cache.disk_path") from None
    except OSError as error:
        advice = "name a folder that can be written in prefix_cache.disk_path"
        raise _no_disk(f"{file} cannot be opened: {error.strerror}", advice) from None
    if free_bytes < wanted_bytes:
        problem = f"{folder} has room for {free_bytes // _MEGA} MB of {config.disk_mb}"
        raise _no_disk(problem, "make room there, or lower prefix_cache.disk_mb")


def _no_disk(problem: str, advice: str) -> ConfigError:
    text = f"the disk tier of the prefix cache: {problem}: {advice}, or leave out disk_mb"
    return ConfigError(text, param="prefix_cache.disk_path")
