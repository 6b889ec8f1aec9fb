"""Shared parts of the live `bench pie`: model, workload, warm sides, slices in turns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT, checkpoint
from bench.live.pie.rounds import Measure, SideResult, Slice, take_turns
from bench.live.pie.sides import BLOCK_TOKENS, EngineSide, Ground, Kind, Workload


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of a slice, of its ramp, of `EngineSide.settle`, and of background traffic.

    On the narrow link sides do equal work: so many answers before the first slice, and per slice.
    """

    rounds: int
    slice_s: float
    ramp_s: float
    still_s: float
    settle_s: float
    away_s: float
    narrow_rounds: int
    narrow_settle_answers: int
    narrow_answers: int


FULL = Pace(8, 8.0, 8.0, 8.0, 180.0, 20.0, 24, 60, 6)
QUICK = Pace(1, 1.5, 0.3, 0.6, 3.0, 2.0, 2, 8, 4)


class Arena:
    """Model, workload and durations, shared by all parts."""

    def __init__(self, context: Context) -> None:
        flags = context.arguments
        self.context = context
        name = flags.model or (str(TINY_CHAT) if context.quick else "random-50m")
        model = checkpoint(name)
        self.workload = Workload(name, context.seed)
        self.mean_tokens = self.workload.mean_tokens()
        blocks = int(flags.fits * self.mean_tokens // BLOCK_TOKENS)
        self.pace = QUICK if context.quick else FULL
        paces = {"ramp_s": self.pace.ramp_s, "least_step_s": flags.step_ms / 1e3}
        self.ground = Ground(model, blocks, flags.bandwidth, flags.clients, **paces)

    @contextmanager
    def sides(
        self, kinds: Sequence[Kind], ground: Ground, warm_answers: int | None = None
    ) -> Iterator[list[EngineSide]]:
        """Yield warm sides: each has served for a while, or `warm_answers` answers."""
        sides: list[EngineSide] = []
        try:
            for kind in kinds:
                sides.append(EngineSide(kind, ground, self.workload.requests(ground.clients)))
                if warm_answers is None:
                    sides[-1].settle(self.pace.still_s, self.pace.settle_s)
                else:
                    sides[-1].serve(warm_answers)
            yield sides
        finally:
            for side in sides:
                side.close()

    def measure(
        self, part: str, sides: Sequence[EngineSide], rounds: int, one_slice: Measure
    ) -> list[SideResult]:
        def on_slice(side: EngineSide, one: Slice) -> None:
            self.context.record({"part": part, "side": side.kind.name, **asdict(one)}, "slices.jsonl")
            bar.advance(now=f"{part}, {side.kind.name}")

        with self.context.progress("slices", rounds * len(sides)) as bar:
            return take_turns(sides, rounds, one_slice, on_slice)

    def notes(self) -> list[str]:
        ground, fits = self.ground, self.context.arguments.fits
        return [
            f"{ground.device_blocks} blocks of {BLOCK_TOKENS} tokens on every side ({fits} mean requests of "
            f"{self.mean_tokens:.0f} tokens), {ground.clients} clients, policy vllm",
            "swap: the prefix cache's host tier over the same link",
        ]
