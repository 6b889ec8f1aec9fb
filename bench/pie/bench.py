"""`python -m bench pie`: KV layers swapped behind the computation, live on this machine, or simulated at the
paper's settings (`--simulated`).
"""

from argparse import ArgumentParser

from bench.context import Context
from bench.outcome import Outcome
from bench.pie import live, simulated


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--simulated", action="store_true", help="at the paper's settings, in the simulator")
    live.add_arguments(parser)
    simulated.add_arguments(parser)


def run(context: Context) -> Outcome:
    """Raises ConfigError for what there is not."""
    return simulated.run(context) if context.arguments.simulated else live.run(context)
