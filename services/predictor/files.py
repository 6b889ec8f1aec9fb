"""Writing a file so that a reader sees all of it or nothing."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Under a name of its own first, then renamed over `path`. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
