"""Real stacks: greedy text with Pie on, fixed and searching, is that of one without."""

from argparse import Namespace
from itertools import islice
from pathlib import Path

from bench.context import Context
from bench.engine.checkpoint import TINY_CHAT
from bench.pie import stack
from bench.pie.sides import Ground
from bench.pie.workload import Workload


def test_stacks_say_the_same_with_pie(tmp_path: Path) -> None:
    context = Context("pie", True, 0, tmp_path, Namespace())
    ground = Ground(TINY_CHAT, 40, 1e9, clients=8)
    requests = list(islice(Workload(str(TINY_CHAT), 2).requests(), 16))
    pie = stack.with_pie(ground)
    sides = {
        "none": {},
        "fixed": {**pie, "worker.pie.expansion": "fixed", "worker.pie.fifo_layers": 6},
        "auto": {**pie, "worker.pie.window_iterations": 4},
    }
    runs = {name: stack.serve(context, ground, requests, more, name) for name, more in sides.items()}
    texts = {name: [each.text for each in run.served.answers] for name, run in runs.items()}
    assert all(run.served.failures == 0 for run in runs.values())
    assert texts["fixed"] == texts["none"] and texts["auto"] == texts["none"]
    assert runs["fixed"].details["total_blocks"] == 80 and runs["fixed"].details["pie_fifo_layers"] == 6
    assert "pie_fifo_layers" not in runs["none"].details
    assert stack.normalized_s(runs["none"].served) > 0
