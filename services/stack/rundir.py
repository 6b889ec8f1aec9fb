"""Run directory: lock, state, credentials and logs of one stack. The supervisor holds `lock` (flock) while it
lives, which proves that it runs, and alone writes `state.json`. `credentials.json` is created once, readable
only by its owner."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.subjects import OPERATOR, permissions_of

ROOT = Path(__file__).resolve().parents[2]
"""Repository root, where `python -m services.…` works."""
DEFAULT_RUN_DIR = ROOT / ".run"
_KEPT_LOGS = 3
_PROBE_BYTES = 65_536
_LEAST_FREE_BYTES = 100_000_000
_ELSEWHERE = "; make room there, or name another folder with --run-dir"
LOG_LIMIT_BYTES = 64 * 1024 * 1024
"""Limit of one log while a stack runs; one older part of that size is kept."""


@dataclass(frozen=True)
class Credentials:
    """Secrets of one stack: the API key, and a password for each bus user."""

    api_key: str
    nats_passwords: Mapping[str, str]
    """Password by NATS user: each instance, and the operator."""

    @property
    def api_key_sha256(self) -> str:
        """Hash of the API key, for the gateway."""
        return hashlib.sha256(self.api_key.encode()).hexdigest()


class RunDirectory:
    """Folder of one stack: lock, state, credentials and logs."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.logs = self.path / "logs"
        self.state_file = self.path / "state.json"
        self.credentials_file = self.path / "credentials.json"
        self.nats_config = self.path / "nats.conf"
        self.keys_file = self.path / "keys.json"
        self.roll_file = self.path / "roll.json"
        self._lock_file = self.path / "lock"
        self._lock: int | None = None

    @property
    def is_default(self) -> bool:
        """True if commands use it without `--run-dir`."""
        return self.path == DEFAULT_RUN_DIR

    def create(self) -> None:
        """Create the folder, accessible only by its owner. Raise ConfigError if it is unusable."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            probe = self.path / "probe"
            probe.write_bytes(bytes(_PROBE_BYTES))
            probe.unlink()
            free_bytes = shutil.disk_usage(self.path).free
        except OSError as error:
            raise ConfigError(
                f"the run directory {self.path} cannot be written: {error.strerror}{_ELSEWHERE}"
            ) from None
        if free_bytes < _LEAST_FREE_BYTES:
            raise ConfigError(
                f"the disk of the run directory {self.path} is full: {free_bytes / 1e6:.0f} MB free, "
                f"{_LEAST_FREE_BYTES / 1e6:.0f} MB wanted for logs and NATS's store{_ELSEWHERE}"
            )

    def acquire(self) -> bool:
        """Take the lock for the life of this process; return False if another process holds it."""
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._lock = descriptor
        return True

    def release(self) -> None:
        """Release the lock, if held."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def holder(self) -> int | None:
        """Return the pid of the running supervisor, or None."""
        if not self._lock_file.exists():
            return None
        with self._lock_file.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdigit() else None
        return None

    def read_state(self) -> dict[str, Any]:
        """Return the state last written by a supervisor; empty if unreadable."""
        return _read_object(self.state_file)

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state atomically."""
        _write_private(self.state_file, json.dumps(state, indent=1))

    def write_roll(self, order: dict[str, Any]) -> None:
        """Write the order for `roll`."""
        _write_private(self.roll_file, json.dumps(order))

    def read_roll(self) -> dict[str, Any]:
        """Return the order for `roll`; empty if unreadable."""
        return _read_object(self.roll_file)

    def credentials(self, *instances: str) -> Credentials:
        """Return the secrets of the operator, of known instances and of these, creating missing ones.
        Passwords begin with a letter, because NATS parses $ and digits."""
        path = self.credentials_file
        found = _read_object(path)
        key, passwords = found.get("api_key"), found.get("nats_passwords")
        known = passwords if isinstance(passwords, dict) else {}
        users = dict.fromkeys([OPERATOR, *filter(_is_user, known), *instances])
        credentials = Credentials(
            api_key=key if isinstance(key, str) else f"sk-{secrets.token_hex(24)}",
            nats_passwords={user: known.get(user) or f"p{secrets.token_hex(24)}" for user in users},
        )
        if credentials.__dict__ != found:
            _write_private(path, json.dumps(credentials.__dict__))
        return credentials

    def rotate_logs(self) -> None:
        """Rename `x.log` to `x.log.1` and so on, dropping the oldest."""
        for log in self.logs.glob("*.log"):
            for number in range(_KEPT_LOGS, 0, -1):
                older = log.with_name(f"{log.name}.{number}")
                newer = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
                if newer.exists():
                    newer.replace(older)

    def trim_logs(self, limit_bytes: int = LOG_LIMIT_BYTES) -> list[str]:
        """Move logs above the limit to `x.log.1` and empty them in place, since their writers append. Return
        the names of trimmed logs. Lines written meanwhile may be lost."""
        trimmed = []
        for log in self.logs.glob("*.log"):
            if log.stat().st_size > limit_bytes:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)
                trimmed.append(log.stem)
        return trimmed


def _is_user(name: str) -> bool:
    try:
        permissions_of(name)
    except ValueError:
        return False
    return True


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_private(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)
