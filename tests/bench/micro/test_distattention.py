"""The bench's parts on a small scale: real creditor processes, real attention."""

import os
from pathlib import Path

import torch

from bench.micro.distattention.attention import LayerTimes, measure_cells, measure_error
from bench.micro.distattention.bench import _figures, draw
from services.worker.peers.attention.core.cost import ShipMode

CORE = max(os.sched_getaffinity(0))


def test_random_partitions_are_exact() -> None:
    torch.set_num_threads(1)
    assert 0 < measure_error(CORE, 2, creditors=2) < 1e-5


def test_every_side_of_a_cell_is_measured() -> None:
    torch.set_num_threads(1)
    done: list[int] = []
    cells = measure_cells(CORE, [64, 128], [1, 1 << 20], 2, lambda: done.append(1))
    assert [(cell.rows, cell.context_tokens) for cell in cells] == [(1, 64), (1, 128)], (
        "the others are too large"
    )
    assert len(done) == 2
    assert all(min(cell.whole_s, cell.ship_s, cell.fetch_s) > 0 for cell in cells)


def cell(rows: int, tokens: int, ship_s: float, fetch_s: float, chosen: ShipMode) -> LayerTimes:
    return LayerTimes(rows, tokens, 0.001, ship_s, fetch_s, ship_s / 0.001 - 1, 0.6, fetch_s / ship_s, chosen)


def test_figures_are_the_longest_decodes(tmp_path: Path) -> None:
    cells = [
        cell(1, 1024, 0.0015, 0.003, ShipMode.SHIP),
        cell(64, 1024, 0.004, 0.003, ShipMode.SHIP),
        cell(1, 4096, 0.0011, 0.0088, ShipMode.SHIP),
    ]
    figures = _figures(cells)
    assert abs(figures["remote_overhead"] - 0.1) < 1e-9
    assert abs(figures["remote_overhead_c1024"] - 0.5) < 1e-9
    assert abs(figures["query_vs_fetch_speedup"] - 8) < 1e-9
    assert abs(figures["choice_regret"] - 1 / 3) < 1e-9
    draw(tmp_path / "figure.png", cells)
    assert (tmp_path / "figure.png").stat().st_size > 1000
