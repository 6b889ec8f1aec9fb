"""Run directory: lock, state, credentials and logs of one stack. The supervisor holds `lock` (flock) while it
lives, which proves that it runs, and alone writes `state.json`. `credentials.json` is created once, readable
only by its owner. The supervisor survives deletions: it answers on a socket, and writes its files again."""

import contextlib
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

from services.stack.process import comes_true
from shared import watchdog
from shared.errors import ConfigError
from shared.key_file import write_private
from shared.subjects import OPERATOR, permissions_of

ROOT = Path(__file__).resolve().parents[2]
"""Repository root, where `python -m services.…` works."""
DEFAULT_RUN_DIR = ROOT / ".run"
_KEPT_LOGS = 3
_PROBE_BYTES = 65_536
_LEAST_FREE_BYTES = 100_000_000
_LOW_BYTES, _LOW_SHARE = 500_000_000, 0.05
_RESTORED_S = 3.0
"""Time in which a supervisor writes a deleted file again."""
_ELSEWHERE = "; make room there, or name another folder with --run-dir"


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
        self.keys_file = self.path / "keys.json"
        self.roll_file = self.path / "roll.json"
        self._lock_file = self.path / "lock"
        self._lock: int | None = None
        self.supervisor = f"stack-{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]}"
        """Name under which the supervisor answers (`shared.watchdog`), also without the lock's file."""

    def nats_config(self, server: str = "nats") -> Path:
        """Return the configuration of a nats-server."""
        return self.path / f"{server}.conf"

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
        """Take the lock for the life of this process, anew if its file was deleted; return False if another
        process holds it."""
        with contextlib.suppress(OSError):
            if self._lock is not None and os.path.samestat(os.fstat(self._lock), self._lock_file.stat()):
                return True
        if self._lock is None and self._answering() is not None:
            return False
        descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self.release()
        self._lock = descriptor
        return True

    def release(self) -> None:
        """Release the lock, if held."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def holder(self) -> int | None:
        """Return the pid of the running supervisor, or None."""
        with contextlib.suppress(FileNotFoundError), self._lock_file.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdigit() else self._answering()
        return self._answering()

    def _answering(self) -> int | None:
        """Return the pid of the supervisor that answers for this folder, or None."""
        return next((pid for pid in watchdog.pids(self.supervisor) if pid != os.getpid()), None)

    def low_disk(self) -> str:
        """Return how little room the disk has, if it is little, or an empty string."""
        try:
            usage = shutil.disk_usage(self.path)
        except OSError as error:
            return f"the run directory {self.path} cannot be read: {error.strerror}"
        if usage.free >= max(_LOW_BYTES, _LOW_SHARE * usage.total):
            return ""
        return f"the disk of {self.path} has {usage.free / 1e6:.0f} MB left"

    def read_state(self) -> dict[str, Any]:
        """Return the state last written by a supervisor; empty if unreadable."""
        return read_object(self.state_file)

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state atomically."""
        write_private(self.state_file, json.dumps(state, indent=1))

    def credentials(self, *instances: str) -> Credentials:
        """Return the secrets of the operator, of known instances and of these, creating missing ones.
        Passwords begin with a letter, because NATS parses $ and digits. Raise ConfigError if the file cannot
        be read: it is never overwritten, because clients and instances elsewhere know its secrets."""
        path = self.credentials_file
        comes_true(lambda: path.exists() or self._answering() is None, _RESTORED_S)
        found: dict[str, Any] = {}
        try:
            found = json.loads(path.read_text())
            key, known = found["api_key"], dict(found["nats_passwords"])
            if not isinstance(key, str):
                raise TypeError("api_key is no text")
        except FileNotFoundError:
            key, known = None, {}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"the credentials in {path} cannot be read ({error!r}); restore the file, or move it away: "
                "`up` then makes new ones, and every client needs the new key"
            ) from None
        users = dict.fromkeys([OPERATOR, *filter(_is_user, known), *instances])
        credentials = Credentials(
            api_key=f"sk-{secrets.token_hex(24)}" if key is None else key,
            nats_passwords={user: known.get(user) or f"p{secrets.token_hex(24)}" for user in users},
        )
        if credentials.__dict__ != found:
            write_private(path, json.dumps(credentials.__dict__))
        return credentials

    def restore(self, copies: dict[Path, str]) -> list[str]:
        """Copy the files that nobody could make again, write those that were deleted, and return their names.
        Raise OSError."""
        missing = []
        for path in {
            self.credentials_file,
            self.keys_file,
            *self.path.glob("nats*.conf"),
            *self.path.glob("tls/*"),
            *copies,
        }:
            if path.exists():
                copies[path] = path.read_text()
            elif path in copies:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(path, copies[path])
                missing.append(path.name)
        return missing

    def rotate_logs(self) -> None:
        """Rename `x.log` to `x.log.1` and so on, dropping the oldest."""
        for log in self.logs.glob("*.log"):
            for number in range(_KEPT_LOGS, 0, -1):
                older = log.with_name(f"{log.name}.{number}")
                newer = log.with_name(f"{log.name}.{number - 1}") if number > 1 else log
                if newer.exists():
                    newer.replace(older)

    def trim_logs(self, most_bytes: int) -> None:
        """Keep all logs within `most_bytes`. A log above a third of its share moves to `x.log.1`, and is then
        emptied in place, since its writer appends: lines written meanwhile may be lost. Oldest parts go."""
        logs = list(self.logs.glob("*.log"))
        for log in logs:
            if log.stat().st_size > most_bytes // (3 * len(logs)):
                with contextlib.suppress(OSError):  # disk full
                    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)
        parts = sorted(self.logs.glob("*.log*"), key=lambda part: (part in logs, part.stat().st_mtime))
        excess_bytes = sum(part.stat().st_size for part in parts) - most_bytes
        for part in parts:
            if excess_bytes <= 0 or part in logs:
                break
            excess_bytes -= part.stat().st_size
            part.unlink()


def _is_user(name: str) -> bool:
    try:
        permissions_of(name)
    except ValueError:
        return False
    return True


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if unreadable."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
