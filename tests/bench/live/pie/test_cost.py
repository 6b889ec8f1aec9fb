"""Equal steps with and without Pie: what they cost and copy."""

from bench.kit.models import TINY_CHAT
from bench.live.pie import cost
from bench.live.pie.sides import Ground


def test_a_queue_copies_more_in_than_out_and_nothing_without_it() -> None:
    plain, queued = cost.compare(Ground(TINY_CHAT, 12, 0.0, clients=1), 8, 2)
    assert (plain.in_bytes, plain.out_bytes, plain.stall_share) == (0, 0, 0)
    assert 0 < queued.out_bytes < queued.in_bytes / 2 and queued.stall_share >= 0
    figures = cost.figures(plain, queued)
    assert all(figures[name] > 0 for name in ("step_vs_none", "step_engine_cpu_vs_none", "step_cpu_vs_none"))
