"""Effects that a stream asks its shell to carry out. Pure data."""

from dataclasses import dataclass

from shared.liveness import Start
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import SequenceRef


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the scheduler the prompt and held tokens as `attempt`; report the result with `serial`."""

    attempt: int
    serial: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the tokens from `first_index` on from the worker."""

    worker: Start
    ref: SequenceRef
    first_index: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the worker that this end was seen and can be forgotten."""

    worker_id: str
    ref: SequenceRef


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this and lower attempts at the worker, if known; also at the scheduler if `is_final`."""

    ref: SequenceRef
    worker_id: str | None
    is_final: bool = True
    """False when a higher attempt follows: its submission informs the scheduler."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Send the target of a hand-over the tokens that the source has computed since."""

    worker_id: str
    ref: SequenceRef
    first_index: int
    tokens: tuple[int, ...]


StreamEffect = Submit | Fetch | Acknowledge | Cancel | Extend
StreamEffects = tuple[StreamEffect, ...]


def disown(report: SequenceReport, worker: Start, *, goes_on: bool) -> Acknowledge | Cancel:
    """Return the reply to a worker that lists an orphan sequence, or a stale attempt (`goes_on`)."""
    if report.state is SequenceState.ENDED:
        return Acknowledge(worker[0], report.ref)
    return Cancel(report.ref, worker[0], is_final=not goes_on)
