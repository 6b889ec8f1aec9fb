"""Real stacks: greedy text with Pie, from six layers in the queue on, is that of one without."""

from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.live.pie import stack
from bench.live.pie.sides import Ground
from bench.live.pie.workload import Workload


@pytest.mark.timeout(400)
def test_stacks_say_the_same_with_pie(tmp_path: Path) -> None:
    context = Context("pie", True, 0, tmp_path, Namespace())
    ground = Ground(TINY_CHAT, 40, 1e9, clients=8)
    requests = list(islice(Workload(str(TINY_CHAT), 2).requests(), 16))
    pie = {**stack.with_pie(ground), "worker.pie.fifo_layers": 6, "worker.pie.window_iterations": 4}
    sides: dict[str, dict[str, object]] = {"none": {}, "pie": pie}
    runs = {name: stack.serve(context, ground, requests, more, name) for name, more in sides.items()}
    texts = {name: [each.text for each in run.served.answers] for name, run in runs.items()}
    assert all(run.served.failures == 0 for run in runs.values())
    assert texts["pie"] == texts["none"] and all(texts["none"])
    assert "pie_fifo_layers" in runs["pie"].details and "pie_fifo_layers" not in runs["none"].details
    assert stack.normalized_s(runs["none"].served) > 0
