"""Which of a model runner's requests a row continues, and which are new to it or over.

A runner of vLLM's keeps the requests of its last step: tokens, blocks, how far they are computed, the token
that was sampled. Rows have no identity, so a row is told by what it says: it has the blocks of such a
request, its next position, and the token that was sampled there. Everything else is told anew, under a new
name, which states all that the runner has to know: no answer depends on a match. What a step does not have is
finished in the next. Knows no tensor and nothing of vLLM but what block 0 is to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.engine.contract import Row
from shared.errors import InternalError

NULL_BLOCKS = 1
"""vLLM pads block tables with block 0: ours begin behind it."""


class NewRequest(NamedTuple):
    """Everything of a request, up to the end of its row."""

    name: str
    tokens: npt.NDArray[np.int32]
    """From position 0. Those before `computed` are 0: their KV is there, and nobody reads them."""
    blocks: list[int]
    """As vLLM counts them."""
    computed: int


class ContinuedRequest(NamedTuple):
    """One token more, the one that was sampled last."""

    name: str
    more_blocks: list[int]
    computed: int
    outputs: int
    """Tokens sampled since it was new."""


class StepRequests(NamedTuple):
    """One step as the runner is told of it. `names` are those of the rows, in order."""

    names: list[str]
    new: list[NewRequest]
    continued: list[ContinuedRequest]
    counts: dict[str, int]
    """Tokens to compute, by name."""
    finished: set[str]
    """To be forgotten before the step."""


@dataclass(slots=True)
class _Known:
    """What the runner has of one request."""

    name: str
    blocks: Sequence[int]
    """Ours, those that it was told."""
    end: int
    """Positions computed."""
    token: int | None = None
    """Sampled for position `end`; None: nothing was, or nothing that can be gone on from."""
    outputs: int = 0


@dataclass(slots=True)
class Requests:
    """Of one runner, from step to step: `begin`, then `end` or `fail`."""

    block_tokens: int
    told_anew: int = 0
    told_on: int = 0
    _numbers: "count[int]" = field(default_factory=count)
    _known: dict[int, _Known] = field(default_factory=dict)
    """Of the last step, by the block of their last position, which no two share."""
    _doomed: set[str] = field(default_factory=set)
    """The runner may have them; nothing goes on from them."""
    _step: list[_Known] = field(default_factory=list)

    def begin(self, rows: Sequence[Row]) -> StepRequests:
        """What to tell the runner of these rows."""
        new: list[NewRequest] = []
        continued: list[ContinuedRequest] = []
        step: list[_Known] = []
        for row in rows:
            known = self._continued(row, continued)
            step.append(self._anew(row, new) if known is None else known)
        finished = self._doomed | {known.name for known in self._known.values()}
        self._known, self._doomed, self._step = {}, finished, step
        self.told_anew += len(new)
        self.told_on += len(continued)
        names = [known.name for known in step]
        counts = {name: len(row.tokens) for name, row in zip(names, rows, strict=True)}
        return StepRequests(names, new, continued, counts, finished)

    def end(self, tokens: Sequence[int | None]) -> None:
        """The step is over; `tokens`: what the runner noted as the next one of each row."""
        self._doomed = set()
        for known, token in zip(self._step, tokens, strict=True):
            known.token = token
            known.outputs += token is not None
            last = known.blocks[(known.end - 1) // self.block_tokens]
            if last in self._known:
                self._doomed.add(self._known[last].name)
            self._known[last] = known
        self._step = []

    def fail(self) -> None:
        """The step broke off: the runner may have heard of all of it or of nothing."""
        self._doomed |= {known.name for known in self._step}
        self._step = []

    def _continued(self, row: Row, continued: list[ContinuedRequest]) -> _Known | None:
        """The request whose next token this row is, taken out of what is known."""
        first = row.first_position
        if first == 0 or len(row.tokens) != 1 or row.point is None:
            return None
        tail = row.blocks[(first - 1) // self.block_tokens]
        known = self._known.get(tail)
        if known is None or known.end != first or known.token != row.tokens[0]:
            return None
        told = len(known.blocks)
        if row.blocks[:told] != known.blocks:
            return None
        del self._known[tail]
        known.blocks, known.end = row.blocks[: first // self.block_tokens + 1], first + 1
        more = [block + NULL_BLOCKS for block in known.blocks[told:]]
        continued.append(ContinuedRequest(known.name, more, first, known.outputs))
        return known

    def _anew(self, row: Row, new: list[NewRequest]) -> _Known:
        first, end = row.first_position, row.first_position + len(row.tokens)
        blocks = row.blocks[: -(-end // self.block_tokens)]
        if len(blocks) * self.block_tokens < end:
            raise InternalError(f"{len(blocks)} blocks for positions up to {end}")
        # What ends in no token is told as a prompt that goes on: the runner drops what it samples of it.
        tokens = np.zeros(end + (row.point is None), dtype=np.int32)
        tokens[first:end] = row.tokens
        known = _Known(f"row-{next(self._numbers)}", blocks, end)
        new.append(NewRequest(known.name, tokens, [block + NULL_BLOCKS for block in blocks], first))
        return known
