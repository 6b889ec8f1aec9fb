"""The JSON document has its keys, and no figure that is not a number."""

import json
import math

import pytest

from bench.kit.outcome import Outcome, as_json, document


def test_the_document_has_the_keys_of_every_bench() -> None:
    made = json.loads(
        as_json(document("x", {"seed": 1}, Outcome({"a_ms": 2}, failures=3, extra={"more": []})))
    )
    assert {"name", "git", "versions", "machine", "config", "figures", "failures"} <= set(made)
    assert (made["name"], made["figures"], made["failures"], made["more"]) == ("x", {"a_ms": 2.0}, 3, [])
    assert made["machine"]["cores"] >= 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_figure_that_was_not_measured_cannot_be_handed_in(wrong: float) -> None:
    with pytest.raises(ValueError, match="a_ms"):
        Outcome({"a_ms": wrong, "b": 1.0}, failures=0)
