"""`house.toml`: ceilings of the figures of `bench house`, and files that a plain chat does not run."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class House:
    """Contents of `house.toml`."""

    ceilings: Mapping[str, float]
    """Largest allowed value by figure."""
    off: Mapping[str, Sequence[str]]
    """File patterns by feature, relative to the root; `*` also matches folders."""

    def excesses(self, figures: Mapping[str, float]) -> list[str]:
        """Return a sentence for each figure above its ceiling; missing figures do not count."""
        return [
            f"{name} is {figures[name]:g}, and house.toml allows {most:g}"
            for name, most in self.ceilings.items()
            if figures.get(name, 0) > most
        ]

    def off_files(self, touched: Iterable[str]) -> dict[str, list[str]]:
        """Return the files of each feature in `off` that a plain chat ran."""
        files = sorted(set(touched))
        return {
            feature: [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
            for feature, patterns in self.off.items()
        }


def read(root: Path) -> House:
    """Read the file. Raises OSError or ValueError if it is missing or no TOML."""
    text = tomllib.loads((root / "house.toml").read_text())
    return House(text["ceilings"], text["off"])
