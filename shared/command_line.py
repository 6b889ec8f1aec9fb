"""Argument parser of all command lines: no abbreviated flags, but suggestions for misspelt names."""

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


def hint(name: str, known: Sequence[str]) -> str:
    """Suggest the closest known name, else list all of them."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(sorted(known))}" if known else ""


class Parser(argparse.ArgumentParser):
    """Parser without abbreviated flags, whose meaning would change as flags are added."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report an unknown flag together with the closest known one."""
        found, rest = super().parse_known_args(args, namespace)
        for word in rest:
            flag = word.partition("=")[0]
            if flag in self._option_string_actions:
                self.error(f"{flag} comes directly after `{self.prog}`")
            if close := get_close_matches(flag, self._option_string_actions, n=1):
                self.error(f"unrecognized argument {word}; did you mean {close[0]}?")
        return found, rest

    def error(self, message: str) -> Any:
        if found := _CHOICE.search(message):
            names = [name.strip("' ") for name in found[2].split(",")]
            if close := get_close_matches(found[1], names, n=1):
                message = f"{message[: found.start()]}{found[1]!r} is unknown; did you mean {close[0]!r}?"
        self.complain(message)

    def complain(self, message: str) -> Any:
        """Print the error and exit with code 2."""
        super().error(message)
