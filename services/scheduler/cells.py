"""Several models in one fleet: each has its own core and questions.

Workers of one model share a queue, batches, moves and loans; models do not affect each other. A cell starts
with the first worker or sequence of its model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from services.scheduler.core.core import SchedulerCore
from services.scheduler.rpc import Questions
from shared.errors import Overloaded, UnavailableError

MOST_MODELS = 64
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """The core and questions of one model."""

    model: str
    core: SchedulerCore
    questions: Questions


class Cells:
    """Cells by model. Empty ones are removed when there are too many."""

    def __init__(self, make: Callable[[str], Cell]) -> None:
        self._make = make
        self._cells: dict[str, Cell] = {}
        self._model_of: dict[str, str] = {}
        """By worker."""

    def __iter__(self) -> Iterator[Cell]:
        return iter(list(self._cells.values()))

    def __len__(self) -> int:
        return len(self._cells)

    def of_model(self, model: str) -> Cell:
        """Return the model's cell, created if needed. Raises Overloaded for too many models, UnavailableError
        for an empty name unless exactly one model is known."""
        if not model:
            if len(self._cells) != 1:
                text = "it names no model, and there are several: name it" if self._cells else "no worker yet"
                raise UnavailableError(text, retry_after_s=_RETRY_S)
            return next(iter(self._cells.values()))
        known = self._cells.get(model)
        if known is None:
            self._make_room()
            known = self._cells[model] = self._make(model)
        return known

    def known(self, model: str) -> Cell | None:
        return self._cells.get(model)

    def of_report(self, worker_id: str, model: str) -> Cell:
        """Return the cell of a worker's reported model. Raises like `of_model`."""
        cell = self.of_model(model)
        self._model_of[worker_id] = model
        return cell

    def of_worker(self, worker_id: str) -> Cell | None:
        """Return the worker's cell, or None if it never reported."""
        return self._cells.get(self._model_of.get(worker_id, ""))

    def describe(self) -> dict[str, Any]:
        """Return the cores' descriptions for people: numbers added, rows concatenated."""
        found: dict[str, Any] = {"snapshots": 0, "standstill_s": 0.0, "workers": [], "queue": []}
        for cell in self:
            for name, value in cell.core.describe().items():
                if name in ("workers", "queue"):
                    of_model = {} if len(self._cells) == 1 else {"model": cell.model}
                    found[name] += [{**row, **of_model} for row in value]
                elif name == "trouble":
                    found[name] = found.get(name) or value
                elif name in ("standstill_s", "foreseen_wait_s"):
                    found[name] = max(found.get(name, 0.0), value)
                else:
                    found[name] = found.get(name, 0) + value
        return found

    def _make_room(self) -> None:
        if len(self._cells) < MOST_MODELS:
            return
        idle = next((cell for cell in self if cell.core.is_empty), None)
        if idle is None:
            raise Overloaded(f"there are {MOST_MODELS} models already", retry_after_s=_RETRY_S)
        del self._cells[idle.model]
        self._model_of = {name: model for name, model in self._model_of.items() if model != idle.model}
