"""`python -m bench pie`: KV swapped during the computation, live here or simulated at the paper's settings
(`--simulated`).
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
    """Run the bench. Raises ConfigError for unknown models or unreadable traces."""
    return pie.run(context) if context.arguments.simulated else live.run(context)
