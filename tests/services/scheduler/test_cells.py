"""A core for each model: who it is for, and that there are not too many."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.scheduler.cells import MOST_MODELS, Cell, Cells
from shared.errors import Overloaded, UnavailableError


def cells_of(made: list[str]) -> Cells:
    """Whose cores say what they are told to."""

    def make(model: str) -> Cell:
        made.append(model)
        says = {"snapshots": 2, "queued": 1, "standstill_s": float(len(made)), "workers": [{"worker": model}]}
        core: Any = SimpleNamespace(is_empty=True, describe=lambda: says)
        return Cell(model, core, cast(Any, None))

    return Cells(make)


def test_workers_belong_to_the_model_that_they_said_last() -> None:
    made: list[str] = []
    cells = cells_of(made)
    assert cells.of_worker("w") is None
    one = cells.of_report("w", "one")
    assert cells.of_worker("w") is one and cells.of_model("one") is one
    two = cells.of_report("w", "two")
    assert cells.of_worker("w") is two and made == ["one", "two"]
    assert cells.describe() == {
        "snapshots": 4,
        "queued": 2,
        "standstill_s": 2.0,
        "queue": [],
        "workers": [{"worker": "one", "model": "one"}, {"worker": "two", "model": "two"}],
    }


def test_who_names_no_model_means_the_only_one() -> None:
    cells = cells_of([])
    with pytest.raises(UnavailableError):
        cells.of_model("")
    one = cells.of_model("one")
    assert cells.of_model("") is one
    assert cells.describe()["workers"] == [{"worker": "one"}]
    cells.of_model("two")
    with pytest.raises(UnavailableError, match="name it"):
        cells.of_model("")


def test_those_that_have_nobody_give_way() -> None:
    cells = cells_of([])
    for number in range(MOST_MODELS + 10):
        cells.of_report(f"w{number}", f"m{number}")
    assert len(cells) == MOST_MODELS
    assert cells.of_worker("w0") is None and cells.of_worker(f"w{MOST_MODELS + 9}") is not None
    for cell in cells:
        cast(Any, cell.core).is_empty = False
    with pytest.raises(Overloaded):
        cells.of_model("one more")
