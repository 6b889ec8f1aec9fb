"""A decode step of a whole model with some keys at another worker, against one with all keys local.

Two workers with a core each: the engine, and a creditor process that only lends. Both sides compute the same
sequences in turns.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.kit.stats import alternate, interval, median_of_ratios
from bench.micro.distattention.creditor import GRANT, lenders, settings_of
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine, warm_up
from services.worker.engine.loading import load
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.debtor import AttendingDebtor
from shared.messages.sequence import Sampling

BLOCK_TOKENS = 16
_WARM_STEPS = 10
_CALLS = ("begin", "send", "collect", "end")


@dataclass(frozen=True)
class RemoteStep:
    """Medians of one batch, in seconds."""

    batch: int
    remote_s: float
    local_s: float
    ratio: float
    low: float
    high: float
    cpu_ratio: float
    """Ratio of the engine's CPU time, remote to local."""
    begin_s: float
    """Time per step to split it and announce it."""
    send_s: float
    """Time per step to collect and send queries."""
    wait_s: float
    """Time per step to wait for answers after the local part."""


def measure_steps(
    folder: Path, core: int, *, batches: list[int], context: int, away: float, turns: int
) -> list[RemoteStep]:
    """Measure steps with a share `away` of each sequence's newest blocks at a creditor on `core`."""
    model = load(str(folder), dtype="float32", device="cpu")
    needed = -(-(context + 1) // BLOCK_TOKENS)
    far = max(1, round(needed * away))
    near = needed - far
    found = []
    for batch in batches:
        own = batch * needed
        with lenders([settings_of(model, batch * far, core, BLOCK_TOKENS)]) as (link,):
            engine = TorchEngine(model, kv_blocks=own, block_tokens=BLOCK_TOKENS)
            warm_up(engine)
            debtor = AttendingDebtor(
                engine.attention,
                q_heads=engine.q_heads,
                own_blocks=own,
                block_tokens=BLOCK_TOKENS,
                staging_blocks=4,
                deadline_s=30.0,
                choose=lambda work, speeds: ShipMode.SHIP,
            )
            debtor.homes.place(range(own, own + batch * far), debtor.add(link, [GRANT]), range(batch * far))
            here = [list(range(at * needed, (at + 1) * needed)) for at in range(batch)]
            there = [
                [*table[:near], *range(own + at * far, own + (at + 1) * far)] for at, table in enumerate(here)
            ]
            sides = [_stepping(engine, context, tables) for tables in (there, here)]
            found.append(_compare(batch, debtor, sides, turns))
            debtor.close()
    return found


def _stepping(
    engine: TorchEngine, context: int, tables: list[list[int]]
) -> Callable[[], tuple[float, float]]:
    """Return a function that runs one step and returns its wall clock and CPU time."""
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
    point = SamplePoint(sampling, 0, 0, [5] * (context + 1))
    rows = [Row([5], context, table, point) for table in tables]

    def step() -> tuple[float, float]:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        engine.step(rows)
        return time.perf_counter() - began_s, time.process_time() - began_cpu_s

    return step


def _compare(
    batch: int, debtor: AttendingDebtor, sides: list[Callable[[], tuple[float, float]]], turns: int
) -> RemoteStep:
    for side in sides:
        for _ in range(_WARM_STEPS):
            side()
    remote, local = alternate(sides, turns)
    wall = [took_s for took_s, _ in remote], [took_s for took_s, _ in local]
    cpu = [cpu_s for _, cpu_s in remote], [cpu_s for _, cpu_s in local]
    low, high = interval(*wall, median_of_ratios)
    spent_s = _timed(debtor)
    for _ in range(turns):
        sides[0]()
    return RemoteStep(
        batch=batch,
        remote_s=median(wall[0]),
        local_s=median(wall[1]),
        ratio=median_of_ratios(*wall),
        low=low,
        high=high,
        cpu_ratio=median(cpu[0]) / median(cpu[1]),
        begin_s=spent_s["begin"] / turns,
        send_s=spent_s["send"] / turns,
        wait_s=spent_s["collect"] / turns,
    )


def _timed(debtor: AttendingDebtor) -> dict[str, float]:
    """Measure the debtor's calls from now on; return their seconds by name."""
    spent_s = dict.fromkeys(_CALLS, 0.0)

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*given: object) -> object:
            began_s = time.perf_counter()
            found = call(*given)
            if isinstance(found, Iterator):
                found = iter(list(found))
            spent_s[name] += time.perf_counter() - began_s
            return found

        return run

    for name in _CALLS:
        setattr(debtor, name, timed(name, getattr(debtor, name)))
    return spent_s
