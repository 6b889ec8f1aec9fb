"""The plot over time."""

from pathlib import Path

from bench.live.pie.pictures import draw_reaction
from bench.live.pie.reaction import Moment


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    moments = [Moment(0.5 * i, 100.0 + i, 3, 0.0) for i in range(10)]
    draw_reaction(tmp_path / "r.png", moments, [(1.0, 3.0)])
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
