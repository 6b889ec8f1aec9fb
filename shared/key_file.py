"""File of API keys, written by `python -m services keys` and read by running gateways.

JSON, by tenant name: `{"keys": {"team-a": {"sha256": HEX, "class": "standard", "max_concurrent": 8}}}`.
It stores hashes. Keys are random, so a leaked hash is useless. An entry may have a plain `key` instead of
`sha256` until `hash_plain` replaces it.
"""

import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

Entries = dict[str, dict[str, Any]]
"""Options of each key, by tenant."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_BYTES = 4 * 1024 * 1024
_PREFIX = "sk-"


def digest_of(key: str) -> str:
    """Return the hash of a key in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def read(path: Path) -> Entries:
    """Return all entries, with plain keys hashed; empty without a file. Raise ConfigError."""
    return {name: _hashed(options) for name, options in _read(path).items()}


def add(path: Path, name: str, options: dict[str, Any]) -> str:
    """Create a key for a tenant and return it. Raise ConfigError if the name is invalid or taken."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a key: 1 to 64 of A-Z a-z 0-9 _ -")
    entries = _read(path)
    if name in entries:
        raise ConfigError(f"there is a key {name!r} already: revoke it first, or take another name")
    key = _PREFIX + secrets.token_hex(24)
    given = {option: value for option, value in options.items() if value is not None}
    _write(path, {**entries, name: {"sha256": digest_of(key), **given}})
    return key


def revoke(path: Path, name: str) -> None:
    """Delete a tenant's key. Raise ConfigError if there is none."""
    entries = _read(path)
    if name not in entries:
        known = ", ".join(entries) or "none"
        raise ConfigError(f"there is no key {name!r} in {path}; there are: {known}")
    _write(path, {other: options for other, options in entries.items() if other != name})


def hash_plain(path: Path) -> list[str]:
    """Replace plain keys by hashes; return the tenants concerned."""
    entries = _read(path)
    plain = [name for name, options in entries.items() if "key" in options]
    if plain:
        _write(path, {name: _hashed(options) for name, options in entries.items()})
    return plain


def _hashed(options: dict[str, Any]) -> dict[str, Any]:
    if "key" not in options:
        return options
    rest = {option: value for option, value in options.items() if option != "key"}
    return {"sha256": digest_of(str(options["key"])), **rest}


def _read(path: Path) -> Entries:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is longer than {_MOST_BYTES} bytes")
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a file of keys: {error}") from None
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(one, dict) for one in entries.values()):
        raise ConfigError(f'{path} is no file of keys: it should be {{"keys": {{NAME: {{"sha256": HEX}}}}}}')
    return entries


def _write(path: Path, entries: Entries) -> None:
    write_private(path, f"{json.dumps({'keys': entries}, indent=1)}\n")


def write_private(path: Path, content: str | bytes) -> None:
    """Replace the file atomically, readable only by its owner."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    draft.replace(path)
