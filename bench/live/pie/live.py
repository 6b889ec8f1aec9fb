"""The live part of `python -m bench pie`: real engines with little KV, in turns, under one scheduler core
each.

Parts: `step`, cost of swapping per step; `room`, a link with spare bandwidth; `best`, the queue found against
a fixed one; `narrow`, a link without; `reaction`, other traffic for a while; `stack`, stacks over HTTP.
Except in `step`, all sides have the same device bytes, buffers included.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch

from bench.kit.context import Context
from bench.kit.outcome import Outcome, joined
from bench.live.pie import parts
from bench.live.pie.arena import Arena
from bench.simulated.pie import figure4

PARTS: dict[str, Callable[[Arena], Outcome]] = {
    "step": parts.step,
    "room": parts.room,
    "best": parts.best,
    "narrow": parts.narrow,
    "reaction": parts.reaction,
    "stack": parts.stack,
}
_ROOM_BYTES_S = 3e9
_SWITCH_INTERVAL_S = 0.0002
"""Same value as in a worker."""


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("of the live part")
    group.add_argument("--part", nargs="+", choices=list(PARTS), help="[all; quick: without stack]")
    group.add_argument("--model", help="folder of a Llama, or a random one [random-50m; quick: tiny_chat]")
    group.add_argument(
        "--fits", type=int, default=8, metavar="N", help="KV for so many mean requests [%(default)s]"
    )
    group.add_argument(
        "--bandwidth",
        type=float,
        default=_ROOM_BYTES_S,
        metavar="B",
        help="of the link, bytes/s [%(default)g]",
    )
    group.add_argument(
        "--clients", type=int, default=48, metavar="N", help="who ask at the same time [%(default)s]"
    )
    group.add_argument("--turns", type=int, metavar="N", help="of each side in `room` [8, quick: 1]")
    group.add_argument(
        "--lengths", type=int, nargs="+", metavar="Q", help="fixed queues in `room`, instead of a search"
    )
    group.add_argument("--trace", type=Path, help="JSONL rows with `prompt` and `response`")


def run(context: Context) -> Outcome:
    """Run the live part. Raises ConfigError for an unreadable model or trace."""
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    flags = context.arguments
    wanted = flags.part or [part for part in PARTS if part != "stack" or not context.quick]
    arena = Arena(context)
    first = Outcome(figure4(), 0, notes=arena.notes(), headline=["fig4_expansion", "fig4_stalls"])
    return joined([first, *(take(arena) for part, take in PARTS.items() if part in wanted)])
