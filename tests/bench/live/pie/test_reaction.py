"""Traffic on a real side's link, and the figures made of a course of it."""

from itertools import islice

import pytest

from bench.kit.models import TINY_CHAT
from bench.live.pie.reaction import Moment, Reaction, figures, react
from bench.live.pie.sides import EngineSide, Ground, fixed
from bench.live.pie.workload import Workload


def test_traffic_slows_the_link_and_goes_away() -> None:
    requests = islice(Workload(str(TINY_CHAT), 1).requests(), 500)
    side = EngineSide(fixed(6), Ground(TINY_CHAT, 24, 4e8, clients=6), requests)
    try:
        heard: list[Moment] = []
        found = react(side, [(0.5, 0.0), (1.0, 3.6e8), (0.5, 0.0)], heard.append)
        assert list(found.moments) == heard and [each.at_s for each in heard] == [0.5, 1.0, 1.5, 2.0]
        assert found.traffic == ((0.5, 1.5),)
        assert side.engine.pie is not None
        assert all(link.background_bytes_s == 0 for link in side.engine.pie.links.values())
        under = found.during(0.5, 1.5)
        assert max(each.stall_share for each in under) > 0
    finally:
        side.close()


def test_figures_say_how_soon_it_settled() -> None:
    lengths = [9] * 6 + [9, 5, 3, 3, 3, 3] + [3, 3, 6, 9, 9, 9, 9, 9, 9]
    moments = tuple(Moment(0.5 * (i + 1), 100.0 * length, length, 0.0) for i, length in enumerate(lengths))
    found = figures(Reaction(moments, ((3.0, 6.0),)))
    assert found["reaction_down_s"] == pytest.approx(1.5)
    assert found["reaction_up_s"] == pytest.approx(2.0)
    assert (found["reaction_layers_before"], found["reaction_layers_under"]) == (9, 3)
    assert found["reaction_tok_s_under"] == pytest.approx(1 / 3)
    assert found["reaction_tok_s_after"] == pytest.approx(1.0)
