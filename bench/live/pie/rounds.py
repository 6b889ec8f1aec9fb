"""Sides measured in turns: results of their slices, and comparisons within rounds."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.kit.plots import Chart, draw_lines
from bench.kit.stats import Work, order_of, ratio_of_wholes, with_interval
from bench.live.pie.sides import EngineSide


@dataclass(frozen=True, slots=True)
class Slice:
    """One turn of a side."""

    tokens_per_s: float
    step_s: float
    batch: float
    stall_share: float
    """Stall time for KV / compute time."""
    fifo_layers: int
    took_s: float = 1.0


Measure = Callable[[EngineSide], Slice]
"""Runs one turn of a side."""


@dataclass(frozen=True, slots=True)
class SideResult:
    """All turns of one side."""

    name: str
    slices: tuple[Slice, ...]
    normalized_s: float
    """Mean seconds per answer token over ended requests, waiting included; 0 if there are none."""
    first_s: float
    """Mean time to the first token, waiting included."""
    ended: int
    failures: int

    @property
    def work(self) -> list[Work]:
        """(tokens, seconds) of each turn."""
        return [(each.tokens_per_s * each.took_s, each.took_s) for each in self.slices]

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the time of all turns."""
        return sum(tokens for tokens, _ in self.work) / sum(took_s for _, took_s in self.work)

    def mean(self, what: Callable[[Slice], float]) -> float:
        return statistics.fmean(what(each) for each in self.slices)


def take_turns(
    sides: Sequence[EngineSide],
    rounds: int,
    one_slice: Measure,
    on_slice: Callable[[EngineSide, Slice], None],
) -> list[SideResult]:
    """Run `rounds` slices of each side in the order A B C, C B A, …"""
    found: list[list[Slice]] = [[] for _ in sides]
    before = [len(side.loop.answers) for side in sides]
    for turn in range(rounds):
        for index in order_of(turn, len(sides)):
            one = one_slice(sides[index])
            found[index].append(one)
            on_slice(sides[index], one)
    return [
        _served(side, tuple(slices), ended) for side, slices, ended in zip(sides, found, before, strict=True)
    ]


def measure(side: EngineSide, duration_s: float) -> Slice:
    """Run a side for `duration_s`."""
    return _measured(side, lambda: side.loop.run(duration_s))


def measure_work(side: EngineSide, answers: int) -> Slice:
    """Run a side for `answers` answers, so that sides differ only in speed."""
    return _measured(side, lambda: side.serve(answers))


def _measured(side: EngineSide, go: Callable[[], None]) -> Slice:
    loop = side.loop
    tokens, steps, batch, ran_s = loop.tokens, loop.steps, loop.batch_sum, loop.ran_s
    stalled_s, computed_s = side.stall_s
    go()
    took_s, count = loop.ran_s - ran_s, max(1, loop.steps - steps)
    waited_s, busy_s = (after - was for after, was in zip(side.stall_s, (stalled_s, computed_s), strict=True))
    return Slice(
        (loop.tokens - tokens) / took_s,
        took_s / count,
        (loop.batch_sum - batch) / count,
        waited_s / busy_s if busy_s > 0 else 0.0,
        side.fifo_layers,
        took_s,
    )


def spread(name: str, ours: SideResult, theirs: SideResult) -> dict[str, float]:
    """Return the overall ratio of throughputs with its 95 % interval."""
    return with_interval(name, ours.work, theirs.work, ratio_of_wholes)


def waiting(
    name: str, what: Callable[[SideResult], float], ours: SideResult, theirs: SideResult
) -> dict[str, float]:
    """Return the ratio of a mean over answers; nothing if no answer ended on a side."""
    return {name: what(ours) / what(theirs)} if ours.ended and theirs.ended else {}


def _served(side: EngineSide, slices: tuple[Slice, ...], ended_before: int) -> SideResult:
    answers = side.loop.answers[ended_before:]
    return SideResult(
        side.kind.name,
        slices,
        statistics.fmean(each.normalized_s for each in answers) if answers else 0.0,
        statistics.fmean(each.first_s - each.sent_s for each in answers) if answers else 0.0,
        len(answers),
        sum(each.reason not in ("stop", "length") for each in answers),
    )


def same_text_share(ours: EngineSide, theirs: EngineSide) -> float:
    """Return the share of requests answered by both that have the same tokens; 1 if there are none."""
    theirs_by_index = {each.index: each.tokens for each in theirs.loop.answers}
    both = [each for each in ours.loop.answers if each.index in theirs_by_index]
    return statistics.fmean(each.tokens == theirs_by_index[each.index] for each in both) if both else 1.0


INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Moment:
    """Means over the interval that ended at `at_s`."""

    at_s: float
    tokens_per_s: float
    fifo_layers: int
    stall_share: float


@dataclass(frozen=True, slots=True)
class Reaction:
    """Moments of a run; `traffic` has (from, to) in seconds."""

    moments: tuple[Moment, ...]
    traffic: tuple[tuple[float, float], ...]

    def during(self, from_s: float, to_s: float) -> list[Moment]:
        return [each for each in self.moments if from_s < each.at_s <= to_s]


def react(
    side: EngineSide, phases: Sequence[tuple[float, float]], on_moment: Callable[[Moment], None]
) -> Reaction:
    """Run phases of (seconds, background bytes per second)."""
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


def reaction_figures(reaction: Reaction) -> dict[str, float]:
    """Return how soon the queue settled under one stretch of traffic and after it, and at what rates."""
    (began_s, ended_s), last_s = reaction.traffic[0], reaction.moments[-1].at_s
    before, after = _late(reaction.during(0, began_s)), _late(reaction.during(ended_s, last_s))
    under = _late(reaction.during(began_s, ended_s))
    return {
        "reaction_down_s": _settled_s(reaction.during(began_s, ended_s), _length(under)) - began_s,
        "reaction_up_s": _settled_s(reaction.during(ended_s, last_s), _length(after)) - ended_s,
        "reaction_tok_s_under": _rate(under) / _rate(before),
        "reaction_stall_under": statistics.fmean(each.stall_share for each in under),
    }


def _late(moments: Sequence[Moment]) -> Sequence[Moment]:
    """Return the last third."""
    return moments[-max(1, len(moments) // 3) :]


def _length(moments: Sequence[Moment]) -> float:
    return float(statistics.median(each.fifo_layers for each in moments))


def _rate(moments: Sequence[Moment]) -> float:
    return statistics.fmean(each.tokens_per_s for each in moments)


def _settled_s(moments: Sequence[Moment], length: float) -> float:
    """Return when the queue first had its final length."""
    return next((each.at_s for each in moments if each.fifo_layers == length), moments[-1].at_s)


def draw_reaction(path: Path, reaction: Reaction) -> None:
    """Draw throughput, queue length and stalls over time, shaded during background traffic."""
    rows = {
        "tokens/s": [(each.at_s, each.tokens_per_s) for each in reaction.moments],
        "layers in the queue": [(each.at_s, float(each.fifo_layers)) for each in reaction.moments],
        "waits / computation": [(each.at_s, each.stall_share) for each in reaction.moments],
    }
    draw_lines(
        path,
        *(
            Chart({name: row}, "", "s", name, marks=False, bottom=0, shaded=reaction.traffic)
            for name, row in rows.items()
        ),
    )
