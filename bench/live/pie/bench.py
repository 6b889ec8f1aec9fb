"""`python -m bench pie`: KV swapped during the computation, live here.

Real engines with little KV take turns, under one scheduler core each and on the same device bytes,
buffers included. Parts: `room`, a link with spare bandwidth; `narrow`, a link without; `reaction`, other
traffic for a while.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable

import torch

from bench.kit.context import Context
from bench.kit.outcome import Outcome, joined
from bench.live.pie import parts
from bench.live.pie.arena import Arena
from bench.simulated import pie

PARTS: dict[str, Callable[[Arena], Outcome]] = {
    "room": parts.room,
    "narrow": parts.narrow,
    "reaction": parts.reaction,
}
_SWITCH_INTERVAL_S = 0.0002
"""Same value as in a worker."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="[all]")
    add("--model", help="folder of a Llama, or a random one [random-50m; quick: tiny_chat]")
    add("--fits", type=int, default=8, metavar="N", help="KV for so many mean requests [%(default)s]")
    add("--bandwidth", type=float, default=3e9, metavar="B", help="of the link, bytes/s [%(default)g]")
    add("--clients", type=int, default=48, metavar="N", help="who ask at the same time [%(default)s]")
    add("--step-ms", type=float, default=0.0, metavar="MS", help="least time of a step [%(default)g]")
    add("--turns", type=int, metavar="N", help="of each side in `room` [8, quick: 1]")
    add("--lengths", type=int, nargs="+", metavar="Q", help="fixed queues in `room`, instead of a search")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for unknown models."""
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    arena = Arena(context)
    first = Outcome(pie.figure4(), 0, notes=arena.notes(), headline=["fig4_expansion", "fig4_stalls"])
    wanted = context.arguments.part
    return joined([first, *(take(arena) for part, take in PARTS.items() if part in wanted)])
