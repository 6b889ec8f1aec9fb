"""Figure 4 of papers/004: nine layers, a swap takes twice a layer's computation."""

from services.worker.pie.sizes import expansion
from services.worker.pie.swap import SwapController
from sim.pie.timeline import Pace, Timeline

_LAYERS, _PACE, _TOKENS = 9, Pace(compute=1, swap_in=2, swap_out=2), 20


def figure4() -> dict[str, float]:
    """Seven slots; and six, which stall."""
    seven, six = (Timeline(SwapController(_LAYERS, fifo_layers), _PACE) for fifo_layers in (4, 5))
    seven.run(_TOKENS)
    six.run(_TOKENS)
    return {
        "fig4_expansion": round(expansion(_LAYERS, 4), 3),
        "fig4_stalls": float(sum(seven.stalls)),
        "fig4_fifo_layer_times": sum(seven.fifo_ticks) / len(seven.fifo_ticks),
        "fig4_stalls_six_slots": sum(six.stalls) / _TOKENS,
    }
