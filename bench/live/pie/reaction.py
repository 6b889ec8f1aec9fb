"""What the expansion does when others begin to use the link, and when they stop. Draws nothing."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.live.pie.rounds import measure
from bench.live.pie.sides import EngineSide

INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """Means over the interval that ended `at_s`."""

    at_s: float
    tokens_per_s: float
    fifo_layers: int
    stall_share: float


@dataclass(frozen=True, slots=True)
class Reaction:
    """`traffic`: (from, to) in seconds."""

    moments: tuple[Moment, ...]
    traffic: tuple[tuple[float, float], ...]

    def during(self, from_s: float, to_s: float) -> list[Moment]:
        return [each for each in self.moments if from_s < each.at_s <= to_s]


def react(
    side: EngineSide, phases: Sequence[tuple[float, float]], on_moment: Callable[[Moment], None]
) -> Reaction:
    """`phases`: (seconds, background bytes per second), one after the other."""
    moments: list[Moment] = []
    traffic: list[tuple[float, float]] = []
    at_s = 0.0
    for duration_s, background_bytes_s in phases:
        side.set_background(background_bytes_s)
        began_s = at_s
        while at_s < began_s + duration_s:
            found = measure(side, INTERVAL_S)
            at_s += INTERVAL_S
            moments.append(Moment(at_s, found.tokens_per_s, found.fifo_layers, found.stall_share))
            on_moment(moments[-1])
        if background_bytes_s:
            traffic.append((began_s, at_s))
    side.set_background(0.0)
    return Reaction(tuple(moments), tuple(traffic))


def figures(reaction: Reaction) -> dict[str, float]:
    """Of one stretch of traffic between two without: how soon it settled, and at what."""
    (began_s, ended_s), last_s = reaction.traffic[0], reaction.moments[-1].at_s
    before, after = _late(reaction.during(0, began_s)), _late(reaction.during(ended_s, last_s))
    under = _late(reaction.during(began_s, ended_s))
    return {
        "reaction_down_s": _settled_s(reaction.during(began_s, ended_s), _length(under)) - began_s,
        "reaction_up_s": _settled_s(reaction.during(ended_s, last_s), _length(after)) - ended_s,
        "reaction_layers_before": _length(before),
        "reaction_layers_under": _length(under),
        "reaction_layers_after": _length(after),
        "reaction_tok_s_under": _rate(under) / _rate(before),
        "reaction_tok_s_after": _rate(after) / _rate(before),
        "reaction_stall_under": statistics.fmean(each.stall_share for each in under),
    }


def _late(moments: Sequence[Moment]) -> Sequence[Moment]:
    """The last third."""
    return moments[-max(1, len(moments) // 3) :]


def _length(moments: Sequence[Moment]) -> float:
    return float(statistics.median(each.fifo_layers for each in moments))


def _rate(moments: Sequence[Moment]) -> float:
    return statistics.fmean(each.tokens_per_s for each in moments)


def _settled_s(moments: Sequence[Moment], length: float) -> float:
    """When it first was at the length it ended at."""
    return next((each.at_s for each in moments if each.fifo_layers == length), moments[-1].at_s)
