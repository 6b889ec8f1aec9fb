"""Sides: the paper's settings where they belong."""

from bench.simulated.ecoserve import sides
from bench.simulated.ecoserve.sides import OURS, RIVALS, PolicySide, case_of, existing
from sim.case import Machine
from sim.workloads import Source


def test_each_side_has_the_settings_of_the_paper() -> None:
    made = {
        side.label: case_of(side, Source("books"), Machine(), requests=9, seed=1)
        for side in (*RIVALS, PolicySide("ecoserve", "ecoserve"))
    }
    assert made["orca"].settings.max_batch_sequences == 8
    assert made["vllm"].settings.max_batch_sequences == 256
    assert dict(made["ecoserve"].options) == sides.SETTINGS["books"]
    assert made["vllm"].options == ()
    assert made["vllm"].chunked_prefill
    assert not made["vllm whole prompts"].chunked_prefill


def test_the_predictor_is_replaced_where_it_is_the_standard_one() -> None:
    sides = existing((*RIVALS, *OURS, PolicySide("nobody", "nobody")), "random")
    assert "nobody" not in {side.label for side in sides}
    assert {side.predictor for side in sides} == {"none", "random"}


def test_bands_are_printed() -> None:
    assert sides.band("sharegpt", "vllm") == "2.5–4"
    assert sides.band("azure", "vllm") == ""
