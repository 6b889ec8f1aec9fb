"""A whole comparison of two sides on one small trace, and the rates of its picture."""

from bench.simulated.ecoserve.comparison import CURVE, Effort, add_curves, compare
from bench.simulated.ecoserve.sides import PolicySide
from sim.case import Machine
from sim.workloads import Source


def test_sides_are_compared_on_the_same_requests() -> None:
    sides = [
        PolicySide("vllm", "vllm", "none"),
        PolicySide("twin", "vllm", "none"),
        PolicySide("orca", "orca", "none"),
    ]
    effort, told = Effort(requests=40, duration_s=1.0, seeds=(0,), processes=1), list[str]()
    (one,) = compare([Source("alpaca")], sides, Machine(), effort, told.append)
    assert one.requests == 40
    assert one.knees["vllm"] == one.knees["twin"] > one.knees["orca"]
    assert all(one.stable[label] <= rate for label, rate in one.knees.items())
    assert one.past_knee["vllm"]["jct_s"] == one.past_knee["twin"]["jct_s"] < one.past_knee["orca"]["jct_s"]
    assert one.peer == "vllm"
    assert one.rate_ratio("twin", "vllm") == 1.0
    assert len(told) == 3 * len(sides)
    add_curves([one], sides[:1], Machine(), effort, told.append)
    assert len(one.curves["vllm"]) == len(CURVE)
    assert one.curves["vllm"][0][1] <= one.curves["vllm"][-1][1]
