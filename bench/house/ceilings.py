"""`house.toml`: ceilings for what `bench house` counts, and the files of features that a plain chat skips."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path


@dataclass(frozen=True)
class House:
    """What `house.toml` says."""

    ceilings: Mapping[str, float]
    """Figure → the most that it may be."""
    off: Mapping[str, Sequence[str]]
    """Feature → patterns of its files, relative to the root; `*` matches folders too."""

    def excesses(self, figures: Mapping[str, float]) -> list[str]:
        """A sentence for each figure above its ceiling. Figures that were not counted do not count."""
        return [
            f"{name} is {figures[name]:g}, and house.toml allows {most:g}"
            for name, most in self.ceilings.items()
            if figures.get(name, 0) > most
        ]

    def off_files(self, touched: Iterable[str]) -> dict[str, list[str]]:
        """Which files of each feature in `off` are among those that a plain chat touched."""
        files = sorted(set(touched))
        return {
            feature: [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
            for feature, patterns in self.off.items()
        }


def read(root: Path) -> House:
    """Raises OSError or ValueError where there is no such file or it is no TOML."""
    text = tomllib.loads((root / "house.toml").read_text())
    return House(text["ceilings"], text["off"])
