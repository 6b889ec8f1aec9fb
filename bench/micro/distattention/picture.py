"""The paper's Figure 12: latency of shipping the query and of fetching the keys, over the context."""

from collections.abc import Sequence
from pathlib import Path

from bench.kit.plots import Figure, picture
from bench.micro.distattention.attention import LayerTimes


@picture
def draw(file: Path, cells: Sequence[LayerTimes]) -> None:
    """Writes a PNG of the decodes among the cells, both axes logarithmic."""
    shown = [cell for cell in cells if cell.rows == 1]
    contexts = [cell.context_tokens for cell in shown]
    figure = Figure(figsize=(6, 4))
    axes = figure.add_subplot()
    axes.plot(contexts, [cell.fetch_s * 1e3 for cell in shown], marker="s", label="keys come here")
    axes.plot(contexts, [cell.ship_s * 1e3 for cell in shown], marker="o", label="the query goes there")
    axes.plot(contexts, [cell.whole_s * 1e3 for cell in shown], color="grey", label="all keys are here")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("ms, one layer, one token")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
