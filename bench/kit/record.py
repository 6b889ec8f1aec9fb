"""`python -m bench record result.json …` appends a run's figures to docs/benchmarks/NAME.md.

There is one block per label (bench and model, or --label); a new run replaces the block of its label. Move
the figures worth keeping into the page's table.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kit.provenance import ROOT
from shared.command_line import Parser
from shared.errors import ConfigError

PAGES = ROOT / "docs" / "benchmarks"


def main(argv: Sequence[str]) -> int:
    """Run the command line. Returns 0, or 2 for a file that is not a result or has no page."""
    parser = Parser(prog="python -m bench record", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="result.json of runs")
    parser.add_argument("--label", help="of the block, for a single result")
    parser.add_argument("--pages", type=Path, default=PAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        for file in arguments.results:
            result = _read(file)
            page: Path = arguments.pages / f"{result['name']}.md"
            if not page.is_file():
                raise ConfigError(f"there is no page docs/benchmarks/{page.name} to write into")
            page.write_text(inserted(page.read_text(), arguments.label or label_of(result), result))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def label_of(result: Mapping[str, Any]) -> str:
    """Return a label such as `engine, vllm, tiny_chat`."""
    config = result["config"]
    words = [
        result["name"],
        config.get("peer"),
        Path(str(config["model"])).name if config.get("model") else None,
    ]
    words.append("quick" if config.get("quick") else None)
    return ", ".join(word for word in words if word)


def inserted(page: str, label: str, result: Mapping[str, Any]) -> str:
    """Return the page with this result in it."""
    block = f"<!-- begin {label} -->\n{rendered(label, result)}\n<!-- end {label} -->"
    there = re.compile(rf"<!-- begin {re.escape(label)} -->.*?<!-- end {re.escape(label)} -->", re.S)
    if there.search(page):
        return there.sub(lambda _: block, page, count=1)
    return f"{page.rstrip()}\n\n{block}\n"


def rendered(label: str, result: Mapping[str, Any]) -> str:
    """Return the result as Markdown, with date, commit and machine."""
    machine, git = result["machine"], result["git"]
    commit = f"{(git['commit'] or 'unknown')[:10]}{' with changes' if git['dirty'] else ''}"
    shown = {name: result["figures"][name] for name in result.get("headline") or result["figures"]}
    simulated = ", simulated" if result.get("simulated") else ""
    lines = [
        f"{label}{simulated}: {result['measured_at'][:10]}, commit {commit}, {machine['cpu']}, "
        f"{machine['cores']} cores, torch {result['versions'].get('torch', '-')}. "
        f"Failures: {result['failures']}.",
        *(f"{note[0].upper()}{note[1:]}." for note in result.get("notes", ())),
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| `{name}` | {value:.4g} |" for name, value in shown.items()),
    ]
    return "\n".join(lines)


def _read(file: Path) -> dict[str, Any]:
    """Return a result. Raises ConfigError if the file is not one."""
    try:
        result: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    missing = {"name", "git", "versions", "machine", "config", "figures", "failures", "measured_at"} - set(
        result
    )
    if missing:
        raise ConfigError(f"{file} is no result of a bench: it lacks {', '.join(sorted(missing))}")
    return result
