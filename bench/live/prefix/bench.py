"""`python -m bench prefix`: hits of the prefix cache, simulated, and their benefit, live."""

from argparse import ArgumentParser, BooleanOptionalAction

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.kit.outcome import Outcome, joined
from bench.live.prefix import live
from bench.live.prefix.live import TIERS
from bench.simulated import prefix
from shared.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    traces = "a file as mooncake's, mooncake, or chats (generated); auto: mooncake's, else chats"
    add("--trace", default="auto", help=f"{traces} [%(default)s]")
    add("--sizes", nargs="+", type=int, metavar="BLOCKS", help="of the cache, in one tier")
    add("--processes", type=int, help="replays at a time [one per core]")
    add("--model", default=str(TINY_CHAT), help="folder of a checkpoint, or random-100m, for the live part")
    add("--simulated", action=BooleanOptionalAction, default=True, help="replay a trace [%(default)s]")
    add("--workloads", nargs="+", choices=("text", "chat"), default=("text", "chat"), help="of the live part")
    add("--tiers", nargs="+", choices=TIERS, default=TIERS, help="compared with none for text")
    add("--live", action=BooleanOptionalAction, default=True, help="serve text and chats [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if both parts are switched off."""
    parts: list[Outcome] = []
    if context.arguments.simulated:
        parts.append(prefix.run(context))
    if context.arguments.live:
        parts.append(live.run(context))
    if not parts:
        raise ConfigError("with --no-simulated and --no-live nothing is measured")
    return joined(parts)
