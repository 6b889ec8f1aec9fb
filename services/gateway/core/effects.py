"""What a stream asks its shell to do. Pure data."""

from dataclasses import dataclass

from shared.liveness import Start
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import SequenceRef


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the scheduler the prompt and the tokens held, under `attempt`; report back with `serial`."""

    attempt: int
    serial: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the worker for the tokens from `first_index` on."""

    worker: Start
    ref: SequenceRef
    first_index: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the worker that it may forget this end."""

    worker_id: str
    ref: SequenceRef


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell the worker, where one is known, to end this attempt and lower ones; the scheduler too if that
    is all.
    """

    ref: SequenceRef
    worker_id: str | None
    is_final: bool = True
    """False when a higher attempt goes on: the scheduler learns that from its submission."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Tell the worker that takes the sequence over what the former one has computed since."""

    worker_id: str
    ref: SequenceRef
    first_index: int
    tokens: tuple[int, ...]


StreamEffect = Submit | Fetch | Acknowledge | Cancel | Extend
StreamEffects = tuple[StreamEffect, ...]


def is_for_an_heir(report: SequenceReport, incarnation: int) -> bool:
    """Whether it is of an earlier start of this gateway, and waits for another one to take it over."""
    return report.heir_of not in (0, incarnation)


def disown(report: SequenceReport, worker: Start, *, goes_on: bool) -> Acknowledge | Cancel:
    """What to tell a worker that lists a sequence, or (`goes_on`) a stale attempt of one, that nobody
    waits for.
    """
    if report.state is SequenceState.ENDED:
        return Acknowledge(worker[0], report.ref)
    return Cancel(report.ref, worker[0], is_final=not goes_on)
