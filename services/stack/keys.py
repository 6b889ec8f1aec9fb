"""`keys`: add, list and revoke API keys while the stack runs; only hashes are stored."""

from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.display import say
from shared import key_file

OPTIONS = ("class", "weight", "max_concurrent", "requests_per_minute", "tokens_per_minute")
"""Options of a key besides its hash."""


def add(path: Path, name: str, options: dict[str, Any], console: Console) -> int:
    """Create a key and print it, this once. Raise ConfigError."""
    print(key_file.add(path, name, options), file=console.file)
    return 0


def revoke(path: Path, name: str, console: Console) -> int:
    """Revoke a key. Raise ConfigError."""
    key_file.revoke(path, name)
    say(console, f"{name} gets in no more")
    return 0


def listed(path: Path, console: Console) -> int:
    """Print all keys with their options. Raise ConfigError."""
    for name, options in sorted(key_file.read(path).items()):
        said = "  ".join(f"{option} {options[option]}" for option in OPTIONS if option in options)
        say(console, f"{name:24} {str(options.get('sha256'))[:8]}…  {said}".rstrip())
    return 0


def hash_plain(path: Path, console: Console) -> int:
    """Replace plain keys by hashes. Raise ConfigError."""
    names = key_file.hash_plain(path)
    say(console, f"hashed: {', '.join(names)}" if names else "every key was hashed already")
    return 0
