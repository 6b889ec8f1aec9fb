"""Sides that have served before they are measured."""

import argparse
from pathlib import Path

from bench.kit.context import Context
from bench.live.pie import arena, live
from bench.live.pie.sides import RECOMPUTE, fixed


def test_sides_begin_after_the_same_work_and_are_closed(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    live.add_arguments(parser)
    ground = arena.Arena(Context("pie", True, 0, tmp_path, parser.parse_args(["--fits", "5"])))
    assert ground.ground.device_blocks == int(5 * ground.mean_tokens // 16) and len(ground.notes()) == 2
    with ground.sides([RECOMPUTE, fixed(6)], ground.ground, warm_answers=3) as sides:
        assert all(3 <= len(side.loop.answers) <= 4 for side in sides)
        answered = len(sides[0].loop.answers)
        sides[0].serve(2)
        assert len(sides[0].loop.answers) >= answered + 2
