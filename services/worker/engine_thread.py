"""The engine loop: one thread that runs commands between steps and emits frames and reports after each step.

While an `OverlappingEngine` computes a step, the thread commits the step before it and prepares the next one.
Only this thread changes the core. Other threads reach it through its `Door`.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.core.plans import StepWork, WorkItem
from services.worker.core.sampling import FAILED, KV_LOST, Sampled, SamplePoint
from services.worker.cores import bind_to
from services.worker.door import Door
from services.worker.engine.contract import Engine, OverlappingEngine, Row, StepRows, StepTicket
from services.worker.engine.step_record import StepRecord
from shared.errors import CreditorLost, InternalError
from shared.recorder import Recorder
from shared.watchdog import STUCK_S, WatchedPart


class Occupancy:
    """Seconds the engine computed and waited between steps since the start; idle time is not counted."""

    def __init__(self) -> None:
        self.engine_s = 0.0
        self.between_s = 0.0
        """From the end of each step that left sequences unfinished to the start of the next step."""
        self._ended_s: float | None = None

    def on_nothing(self) -> None:
        """Record that no step can run now."""
        self._ended_s = None

    def on_iteration(self, began_s: float, ended_s: float, *, is_more_to_do: bool) -> None:
        """Record one step. `is_more_to_do`: some of its sequences are unfinished."""
        if self._ended_s is not None:
            self.between_s += began_s - self._ended_s
        self.engine_s += ended_s - began_s
        self._ended_s = ended_s if is_more_to_do else None


_log = logging.getLogger("kvasir.worker.runner")
_TICK_S = 0.25
_NOWHERE: Mapping[int, int] = {}
_UNKNOWN = (0,)
_PATIENCE, _UNFORESEEN_S = 20.0, 60.0
"""A step may take this many times its foreseen duration; a step of unknown duration may take this long."""
_MOST_BROKEN_STEPS = 3
"""Number of consecutive steps without a computed row after which the engine counts as broken."""


class Runner:
    """The engine's thread, the only one that uses `door.core` and the engine.

    It is bound to `cores`; empty keeps the process's. All callbacks run on this thread: `between` before each
    step, `on_tick` four times a second, `on_broken` when an error ends the thread. When a creditor fails,
    `lost_blocks` returns the ids of the blocks that it held.
    """

    def __init__(
        self,
        door: Door,
        engine: Engine,
        *,
        on_tick: Callable[[], None] = lambda: None,
        on_broken: Callable[[BaseException], None],
        cores: Sequence[int] = (),
        between: Callable[[], None] = lambda: None,
        lost_blocks: Callable[[CreditorLost], set[int]] = lambda _: set(),
        recorder: Recorder | None = None,
        remote_s: Callable[[], float] = lambda: 0.0,
        account: WatchedPart | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        """`remote_s` returns the total seconds that steps have waited for creditors. `account` is told what
        the thread does; less than `stuck_s` counts as progress."""
        self._account = account or WatchedPart("engine")
        self._stuck_s = stuck_s
        self._record = None if recorder is None else StepRecord(recorder)
        self._remote_s = remote_s
        self.door = door
        self._core = door.core
        self._clock = door.clock
        self._engine = engine
        self._on_tick = on_tick
        self._on_broken = on_broken
        self._cores = cores
        self._between = between
        self._lost_blocks = lost_blocks
        self._gone_blocks: set[int] = set()
        """Ids of the blocks lost in the current step."""
        self.occupancy = Occupancy()
        self._overlaps = isinstance(engine, OverlappingEngine) and engine.overlaps
        self._flight: _Flight | None = None
        """The step in flight, between two turns."""
        self._finished_s = 0.0
        self._core.settle = door.settle = self.settle
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ticked_s = self._clock()
        self._broken_steps = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Finish the running step and end the thread. Return False if that takes over `deadline_s`."""
        self._stopping.set()
        self.door.wake()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            bind_to(self._cores, "engine_cores")
            while not self._stopping.is_set():
                self.turn()
            self.settle()
        except BaseException as error:
            self._on_broken(error)

    def turn(self) -> None:
        """Run the waiting commands and one step; on the engine's thread."""
        self._take_commands()
        self._between()
        self._step()

    def _take_commands(self) -> None:
        """Run the waiting commands. Without a runnable plan, wait up to one tick for the next command."""
        self._account.at("commands", self._stuck_s)
        can_run = self._flight is not None or (self._core.has_plans and not self._core.is_held)
        self.door.run_waiting(0.0 if can_run else _TICK_S)
        now_s = self._clock()
        if now_s - self._ticked_s >= _TICK_S:
            self._ticked_s = now_s
            self.settle()
            self.door.emit(self._core.on_tick(now_s))
            self._on_tick()

    def _step(self) -> None:
        """Begin a step, and finish the one before it; if the engine does not overlap, the same one."""
        work = self._begun()
        if work is None and self._flight is not None:
            self.settle()
            work = self._begun()
        if work is None:
            self.occupancy.on_nothing()
            return
        before = self._flight
        rows = rows_for(work, None if before is None else before.work)
        flight = _Flight(work, rows, self._clock(), self._remote_s())
        if not self._overlaps:
            self._finish(flight)
            return
        self._account.at("a step", partial(self._allowed_s, work))
        flight.ticket = self._submit(rows)
        self._flight = flight
        if before is not None:
            self._finish(before)

    def _begun(self) -> StepWork | None:
        """Return the next step's work, if there is any."""
        work, effects = self._core.begin_step(self._clock())
        self.door.emit(effects)
        if self._record is not None:
            self._record.waits(self._core.put_off, self._clock())
            self._record.said(effects, self._clock())
        return work

    def _submit(self, rows: StepRows) -> StepTicket:
        assert isinstance(self._engine, OverlappingEngine)
        try:
            return self._engine.submit(rows)
        except Exception as error:
            return _Failed(error)

    def settle(self) -> None:
        """Finish the step in flight; on the engine's thread."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._finish(flight)

    def _finish(self, flight: "_Flight") -> None:
        """Wait for a step's tokens, commit them and send them. The step after it may be in flight."""
        work, record = flight.work, self._record
        self._account.at("a step", partial(self._allowed_s, work))
        tokens = self._tokens(flight)
        ended_s, remote_s = self._clock(), self._remote_s()
        began_s = max(flight.began_s, self._finished_s)
        self._finished_s = ended_s
        effects = self._core.finish_step(work, tokens, ended_s, ended_s - began_s)
        self.door.emit(effects)
        self._core.publish_full()
        if record is not None:
            record.ran(work, began_s, ended_s - began_s, effects, remote_s - flight.remote_s)
            record.said(effects, ended_s)
        if self._gone_blocks:
            gone, self._gone_blocks = self._gone_blocks, set()
            self._core.on_kv_lost(gone, ended_s)
        self.occupancy.on_iteration(began_s, ended_s, is_more_to_do=work.is_alive)
        later = self._flight
        if later is not None and later.is_void:
            self.settle()

    def _allowed_s(self, work: StepWork) -> float:
        """Return the time after which a step counts as stuck."""
        return max(self._stuck_s, _PATIENCE * self._core.foreseen_s(work) or _UNFORESEEN_S)

    def _tokens(self, flight: "_Flight") -> Sequence[Sampled | None]:
        """Return the tokens of a step. If it failed, compute it again when nothing is in flight. The step
        after it needs its tokens, so it is computed again too."""
        if flight.is_void:
            return self._compute_alive(flight.work, self._compute)
        if flight.ticket is None:
            return self._compute(flight.rows)
        try:
            tokens = flight.ticket.result()
            self._broken_steps = 0
            return tokens
        except Exception as failed:
            later, error = self._flight, failed
            if later is not None and later.ticket is not None:
                later.is_void = True
                with suppress(Exception):
                    later.ticket.result()
            return self._compute_alive(flight.work, lambda rows: self._compute_again(rows, error))

    @staticmethod
    def _compute_alive(
        work: StepWork, compute: Callable[[list[Row]], Sequence[Sampled | None]]
    ) -> list[Sampled | None]:
        """Compute the rows of a step whose sequences are alive; their tokens are known by now."""
        are_alive = [item.sequence.alive for item in work.items]
        rows = [row_of(item) for item in work.items if item.sequence.alive]
        found = iter(compute(rows) if rows else ())
        return [next(found) if is_alive else None for is_alive in are_alive]

    def _compute(self, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        try:
            tokens = self._engine.step(rows)
            self._broken_steps = 0
            return tokens
        except Exception as error:
            return self._compute_again(rows, error)

    def _compute_again(self, rows: Sequence[Row], error: Exception) -> Sequence[Sampled | None]:
        """Compute the rows of a failed step in other ways."""
        if isinstance(error, CreditorLost):
            return self._compute_without(rows, error)
        _log.error("a step of %d rows failed; each is tried alone", len(rows), exc_info=error)
        return self._compute_singly(rows)

    def _compute_without(self, rows: Sequence[Row], error: CreditorLost) -> Sequence[Sampled | None]:
        """Run the step again without the rows that have blocks at the failed creditor."""
        gone = self._lost_blocks(error)
        kept = [row for row in rows if gone.isdisjoint(row.blocks)]
        if len(kept) == len(rows):
            _log.error("a step needed a creditor that no row has blocks at: %s", error)
            return self._compute_singly(rows)
        _log.warning("%d of %d rows lost their KV: %s", len(rows) - len(kept), len(rows), error)
        self._gone_blocks |= gone
        tokens = iter(self._compute(kept) if kept else [])
        return [next(tokens) if gone.isdisjoint(row.blocks) else KV_LOST for row in rows]

    def _compute_singly(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Run each row as a step of its own, so that only the failing rows end their sequences.

        Raises InternalError after `_MOST_BROKEN_STEPS` consecutive steps in which every row failed.
        """
        tokens: list[Sampled | None] = []
        for row in rows:
            if not self._gone_blocks.isdisjoint(row.blocks):
                tokens.append(KV_LOST)
                continue
            try:
                tokens += self._engine.step([row])
            except CreditorLost as error:
                self._gone_blocks |= self._lost_blocks(error)
                is_gone = not self._gone_blocks.isdisjoint(row.blocks)
                _log.warning("a row %s: %s", "lost its KV" if is_gone else "of no creditor failed", error)
                tokens.append(KV_LOST if is_gone else FAILED)
            except Exception:
                _log.exception(
                    "a row of %d tokens at position %d failed", len(row.tokens), row.first_position
                )
                tokens.append(FAILED)
        self._broken_steps = self._broken_steps + 1 if all(token == FAILED for token in tokens) else 0
        if self._broken_steps >= _MOST_BROKEN_STEPS:
            raise InternalError(f"{_MOST_BROKEN_STEPS} iterations in a row failed altogether")
        return tokens


@dataclass(slots=True)
class _Flight:
    """A step that was begun. `began_s`: when it was submitted; `remote_s`: `Runner.remote_s` at that time."""

    work: StepWork
    rows: StepRows
    began_s: float
    remote_s: float
    ticket: StepTicket | None = None
    """None: it is computed when it is finished."""
    is_void: bool = False
    """The step before it failed."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """The ticket of a step that could not be submitted."""

    error: Exception

    def result(self) -> Sequence[Sampled | None]:
        raise self.error


def row_of(item: WorkItem, places: Mapping[int, int] = _NOWHERE) -> Row:
    """Return the engine's row for a work item. `places`: rows of sequences in flight, by their `id`."""
    sequence, first, end = item.sequence, item.first_token, item.end_token
    tokens = [*sequence.tokens, *item.guessed] if item.guessed else sequence.tokens
    point = None
    if item.samples:
        sampling = sequence.sampling
        index = end - sequence.prompt_tokens - sampling.forced_tokens
        point = SamplePoint(sampling, sequence.ref.choice, index, tokens)
    if first >= len(tokens):
        return Row(_UNKNOWN, first, sequence.blocks, point, places[id(sequence)], sequence.adapter)
    return Row(tokens[first:end], first, sequence.blocks, point, adapter=sequence.adapter)


def rows_for(work: StepWork, before: StepWork | None) -> StepRows:
    """Return a step's rows. `before`: the step in flight, whose tokens are not known yet; None: there is
    none."""
    batch = work.decodes
    if before is None:
        return StepRows(batch, [row_of(item) for item in work.others])
    if batch is not None and before.decodes is not None and batch.group is before.decodes.group:
        after, places = np.arange(len(batch)), _NOWHERE
        if work.others:
            places = before.places
    else:
        places = before.places
        sequences = () if batch is None else batch.group.sequences
        after = np.array([places.get(id(sequence), -1) for sequence in sequences], dtype=np.int64)
    return StepRows(batch, [row_of(item, places) for item in work.others], after)
