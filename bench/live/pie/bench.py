"""`python -m bench pie`: KV layers swapped behind the computation, live on this machine, or simulated at the
paper's settings (`--simulated`).
"""

from argparse import ArgumentParser

from bench.kit.context import Context
from bench.kit.outcome import Outcome
from bench.live.pie import live
from bench.simulated import pie


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--simulated", action="store_true", help="at the paper's settings, in the simulator")
    live.add_arguments(parser)
    pie.add_arguments(parser)


def run(context: Context) -> Outcome:
    """Raises ConfigError for what there is not."""
    return pie.run(context) if context.arguments.simulated else live.run(context)
