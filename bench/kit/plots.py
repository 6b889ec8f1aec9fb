"""Where pictures are drawn with: matplotlib. A bench measures without it, too, and says that it draws none.

`@picture` marks a function that draws and returns nothing; `Figure` is matplotlib's, for use inside one.
"""

import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, ParamSpec

HAS_MATPLOTLIB = find_spec("matplotlib") is not None

if TYPE_CHECKING or HAS_MATPLOTLIB:
    from matplotlib.figure import Figure
else:
    Figure = None

__all__ = ["Figure", "picture"]
P = ParamSpec("P")


def picture(draw: Callable[P, None]) -> Callable[P, None]:
    """`draw`, skipped with a sentence where matplotlib is not installed."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> None:
        if HAS_MATPLOTLIB:
            draw(*args, **kwargs)
        else:
            _say_once()

    return drawn


@cache
def _say_once() -> None:
    print("no pictures, as matplotlib is not installed (`make dev` does that)", file=sys.stderr)
