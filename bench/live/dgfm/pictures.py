"""The picture of `python -m bench dgfm`: Figure 10 of the paper, throughput over time. PNG, no display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bench.kit.plots import Figure, picture

_WINDOWS = 40


class Run(Protocol):
    """Of one side on one workload. Times are seconds since its start."""

    def tok_s(self, first_s: float = ..., end_s: float = ...) -> float: ...

    def remote_share(self, first_s: float = ..., end_s: float = ...) -> float: ...


@picture
def draw_figure_10(
    path: Path, results: Mapping[str, Sequence[Run]], duration_s: float, how: str = "simulated"
) -> None:
    """Above tokens per second, below the share of KV that is remote, means over the workloads."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    window_s = duration_s / _WINDOWS
    middles = [(at + 0.5) * window_s for at in range(_WINDOWS)]
    for side, runs in results.items():
        rates, shares = [], []
        for at in range(_WINDOWS):
            first_s, end_s = at * window_s, (at + 1) * window_s
            rates.append(sum(one.tok_s(first_s, end_s) for one in runs) / len(runs))
            shares.append(sum(one.remote_share(first_s, end_s) for one in runs) / len(runs))
        above.plot(middles, rates, label=side)
        below.plot(middles, shares, label=side)
    above.set(title=f"With and without DGFM ({how})", ylabel="output tok/s")
    below.set(xlabel="s", ylabel="remote share of the KV in use")
    below.set_ylim(bottom=0)
    above.legend(fontsize="small")
    figure.savefig(path, format="png")
