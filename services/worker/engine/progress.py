"""Progress of loading a model, as `up` shows it. The loading thread writes it, the event loop reads it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MEGA = 1e6


class LoadProgress:
    """Text that describes the current step."""

    def __init__(self) -> None:
        self._tell: Callable[[], str] = lambda: "starts"

    def at(self, step: str | Callable[[], str]) -> None:
        """Set the current step; a function is called at each read, on another thread."""
        self._tell = step if callable(step) else lambda: step

    @property
    def text(self) -> str:
        return self._tell()

    @contextmanager
    def downloading(self, name: str, folder: Path, total_bytes: int) -> Iterator[None]:
        """Show the progress of a download into `folder`; `total_bytes` 0: size unknown."""
        already, began_s = _size_of(folder), time.monotonic()

        def tell() -> str:
            size = _size_of(folder)
            rate = (size - already) / max(0.1, time.monotonic() - began_s)
            text = f"downloads {name}: {size / _MEGA:,.0f} MB"
            text += f" of {total_bytes / _MEGA:,.0f}" if total_bytes else ""
            text += f", {rate / _MEGA:.1f} MB/s"
            left = max(0, total_bytes - size)
            return f"{text}, {left / rate:.0f} s left" if left and rate > 0 else text

        self.at(tell)
        try:
            yield
        finally:
            self.at("reads the model")


def _size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, including unfinished downloads."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed in the meantime
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total
