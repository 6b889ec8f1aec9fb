"""Maps rows to requests of a vLLM model runner: continued, new or finished.

A runner keeps the requests of its last step. A row continues a request if it has the request's blocks, next
position and sampled token, or is `Row.after` it; else it is a new request with its full state. A request
without a row in a step is finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.engine.contract import Row
from shared.errors import InternalError

NULL_BLOCKS = 1
"""vLLM pads block tables with block 0, so Kvasir's blocks begin after it."""


class NewRequest(NamedTuple):
    """A request with its full state up to the end of its row."""

    name: str
    tokens: npt.NDArray[np.int32]
    """Tokens from position 0; those before `computed` are 0, because their KV exists."""
    blocks: list[int]
    """Block table in vLLM's numbering."""
    computed: int
    adapter: str = ""


class ContinuedRequest(NamedTuple):
    """A request that continues with the token that was sampled last."""

    name: str
    more_blocks: list[int]
    computed: int
    outputs: int
    """Number of tokens sampled since the request was new."""


class StepRequests(NamedTuple):
    """The requests of one step; `names` in the order of the rows."""

    names: list[str]
    new: list[NewRequest]
    continued: list[ContinuedRequest]
    counts: dict[str, int]
    """Number of tokens to compute, by name."""
    finished: set[str]
    """Requests to drop before the step."""


@dataclass(slots=True)
class Known:
    """The runner's state of one request after a step."""

    name: str
    blocks: Sequence[int]
    """Block table that the runner has, in Kvasir's numbering."""
    end: int
    """Number of computed positions."""
    outputs: int
    """Number of tokens sampled since the request was new."""
    adapter: str
    token: int | None = None
    """Token sampled for position `end`; None: there is none, or the host does not have it yet."""


@dataclass(slots=True)
class Requests:
    """Requests of one runner over its steps: call `begin`, then `end`, or `fail` at any time."""

    block_tokens: int
    _numbers: "count[int]" = field(default_factory=count)
    _known: dict[int, Known] = field(default_factory=dict)
    """Requests of the last step, by the block of their last position, which is unique."""
    _doomed: set[str] = field(default_factory=set)
    """Names of requests that the runner may have and that must be finished."""
    _step: list[Known] = field(default_factory=list)

    def begin(self, rows: Sequence[Row]) -> StepRequests:
        """Return the requests for a step with these rows. Raises InternalError for a row after none."""
        new: list[NewRequest] = []
        continued: list[ContinuedRequest] = []
        step: list[Known] = []
        self._doomed.update(known.name for known in self._known.values())
        for row in rows:
            known = self._continued(row, continued)
            step.append(self._anew(row, new) if known is None else known)
        self._doomed.difference_update(each.name for each in continued)
        self._known, self._step = {}, step
        names = [known.name for known in step]
        counts = {name: len(row.tokens) for name, row in zip(names, rows, strict=True)}
        return StepRequests(names, new, continued, counts, set(self._doomed))

    def end(self) -> list[Known]:
        """End a step that is computed; return its rows, whose `token` is set once the host has it."""
        self._doomed.clear()
        for known in self._step:
            last = known.blocks[(known.end - 1) // self.block_tokens]
            if last in self._known:
                self._doomed.add(self._known[last].name)
            self._known[last] = known
        step, self._step = self._step, []
        return step

    def fail(self) -> None:
        """End a failed step, of which the runner may have any part."""
        self._doomed.update(known.name for known in (*self._step, *self._known.values()))
        self._known, self._step = {}, []

    def _continued(self, row: Row, continued: list[ContinuedRequest]) -> Known | None:
        """Return the request that this row continues and remove it from `_known`; None if there is none."""
        first = row.first_position
        if first == 0 or len(row.tokens) != 1 or row.point is None:
            return None
        tail = row.blocks[(first - 1) // self.block_tokens]
        known = self._known.get(tail)
        if known is None or known.end != first or (row.after < 0 and known.token != row.tokens[0]):
            return None
        told = len(known.blocks)
        if row.blocks[:told] != known.blocks or row.adapter != known.adapter:
            return None
        del self._known[tail]
        blocks = row.blocks[: first // self.block_tokens + 1]
        more = [block + NULL_BLOCKS for block in blocks[told:]]
        continued.append(ContinuedRequest(known.name, more, first, known.outputs))
        return Known(known.name, blocks, first + 1, known.outputs + 1, known.adapter)

    def _anew(self, row: Row, new: list[NewRequest]) -> Known:
        if row.after >= 0:
            raise InternalError("a row goes on after a step that failed")
        first, end = row.first_position, row.first_position + len(row.tokens)
        blocks = row.blocks[: -(-end // self.block_tokens)]
        if len(blocks) * self.block_tokens < end:
            raise InternalError(f"{len(blocks)} blocks for positions up to {end}")
        # A row without a point is an unfinished prompt to the runner, which then drops its sampled token.
        tokens = np.zeros(end + (row.point is None), dtype=np.int32)
        tokens[first:end] = row.tokens
        outputs = int(row.point is not None)
        known = Known(f"row-{next(self._numbers)}", blocks, end, outputs, row.adapter)
        table = [block + NULL_BLOCKS for block in blocks]
        new.append(NewRequest(known.name, tokens, table, first, row.adapter))
        return known
