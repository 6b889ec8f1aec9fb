"""Makes the number of workers what placement wants: stops those that get nothing, starts one when one lacks.

A file of its own because it brings the bus, whose import takes longer than the rest of a start: the
supervisor starts its children first.
"""

from collections.abc import Sequence
from typing import Protocol

from shared import subjects
from shared.bus import Handler, Listener
from shared.messages.moves import WorkersWanted

HANDLERS: tuple[Handler, ...] = (Listener(subjects.PLACEMENT_WANTED, WorkersWanted, "on_wanted"),)


class Scaler(Protocol):
    """Whatever can start and stop workers by their ids; the supervisor here, an orchestrator elsewhere.

    `stop` and `start` only begin it.
    """

    def workers(self) -> tuple[Sequence[str], Sequence[str]]:
        """Those that run or are about to, and those that are stopped and could be started."""
        ...

    def stop(self, worker_id: str) -> None: ...

    def start(self, worker_id: str) -> None: ...


def differences(
    event: WorkersWanted, running: Sequence[str], stopped: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What to stop and what to start. The last worker that runs is never stopped."""
    parked = [name for name in running if name in event.parked]
    needed = [name for name in running if name not in event.parked]
    able = sorted(name for name in stopped if name not in event.parked)
    started = able[: max(0, event.wanted - len(needed))]
    if not needed and not started:
        parked = parked[1:]
    return parked, started


class WorkerScaling:
    """Works off the difference between what placement wants and what runs, each time that it is told.

    Placement says it again and again, so nothing has to be remembered here.
    """

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler

    def on_wanted(self, event: WorkersWanted) -> None:
        running, stopped = self._scaler.workers()
        to_stop, to_start = differences(event, running, stopped)
        for worker_id in to_stop:
            self._scaler.stop(worker_id)
        for worker_id in to_start:
            self._scaler.start(worker_id)
