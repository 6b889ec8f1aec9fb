"""A run that was cut short goes on where it stopped, and stops in time."""

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.live.engine.duel import CELLS_FILE, Duel, missing, rows_of, run_turns
from bench.live.engine.workload import BatchCell, cells

CELLS = cells([100], [1, 8], 4)
PLAN = [(turn, cell) for turn in range(2) for cell in CELLS]


class Recording(Duel):
    """Records that a turn was taken."""

    def turn(self, cell: BatchCell, alternation: int) -> Any:
        for side in ("kvasir", "vllm"):
            self.context.record({"alternation": alternation, "cell": cell.name, "side": side}, CELLS_FILE)


def make(tmp_path: Path) -> Recording:
    context = Context("engine", quick=True, seed=0, run_dir=tmp_path, arguments=Namespace())
    return Recording(context, [], Cores(0, 1), 100)


def test_turns_end_within_the_budget_and_the_rest_is_done_by_the_next_run(tmp_path: Path) -> None:
    duel = make(tmp_path)
    clock = itertools.count()
    left = run_turns(duel, PLAN, budget_s=6, now_s=lambda: float(next(clock)))
    done = len(rows_of(tmp_path)) // 2
    assert 0 < done < len(PLAN)
    assert left == len(PLAN) - done
    todo = missing(PLAN, rows_of(tmp_path))
    assert todo == PLAN[done:]
    assert run_turns(duel, todo, budget_s=100) == 0
    assert missing(PLAN, rows_of(tmp_path)) == []


def test_a_turn_that_one_side_did_not_finish_is_done_again(tmp_path: Path) -> None:
    rows = [{"alternation": 0, "cell": CELLS[0].name, "side": "kvasir"}]
    assert missing(PLAN, rows) == PLAN
    assert rows_of(tmp_path) == []
