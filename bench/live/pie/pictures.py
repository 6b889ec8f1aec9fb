"""Pictures of `python -m bench pie`. PNG, no display."""

from collections.abc import Sequence
from pathlib import Path

from bench.kit.plots import Figure, picture
from bench.live.pie.reaction import Moment


@picture
def draw_reaction(path: Path, moments: Sequence[Moment], traffic: Sequence[tuple[float, float]]) -> None:
    """Throughput, the queue's length and the waits over time; shaded while others use the link."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    at_s = [each.at_s for each in moments]
    upper.plot(at_s, [each.tokens_per_s for each in moments], color="#4878a8")
    upper.set_ylabel("tokens/s")
    middle.step(at_s, [each.fifo_layers for each in moments], where="post", color="#a85848")
    middle.set_ylabel("layers in the queue")
    lower.plot(at_s, [each.stall_share for each in moments], color="#58a868")
    lower.set(ylabel="waits / computation", xlabel="s", ylim=(0, None))
    for axes in (upper, middle, lower):
        for began_s, ended_s in traffic:
            axes.axvspan(began_s, ended_s, color="grey", alpha=0.2)
    upper.set_title("grey: others use most of the link")
    figure.savefig(path, format="png")
