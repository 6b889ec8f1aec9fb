"""Watches workers whose memory runs out and takes the next rung of the ladder (`policy/relief.py`). Pure.

Only migration is done from here; the other rungs belong to whoever has the blocks (the worker evicts, a
batching policy preempts), and do as they did. What is weighed is what workers report: a rung whose cost
nobody measures yet is not offered. Every decision is an effect, with its costs, for the log. `algorithms.md`
§7.
"""

from collections.abc import Iterator

from services.scheduler.effects import Effect, NoteRelief
from services.scheduler.moves import Moves
from services.scheduler.planning import Lane, Sync
from services.scheduler.policy.relief import BY_KV, Neighbour, Pressure, Rung, Speeds, Victim, next_relief
from services.scheduler.roster import Roster
from services.scheduler.rules import ReliefRules
from services.scheduler.state import Phase, Sequence
from shared.errors import InvalidRequest
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported


class PressureWatch:
    """One decision for each worker in need, at most every `interval_s`."""

    def __init__(self, roster: Roster, moves: Moves, rules: ReliefRules) -> None:
        self._roster = roster
        self._moves = moves
        self._rules = rules
        self._next_s: dict[str, float] = {}
        self.decisions: dict[str, int] = {}

    def on_tick(self, now_s: float) -> list[Effect]:
        """Decides where it is time to."""
        effects: list[Effect] = []
        if not self._rules.enabled:
            return effects
        for lane in self._roster.lanes.values():
            if now_s >= self._next_s.get(lane.worker_id, now_s):
                effects += self._relieve(lane, now_s)
        return effects

    def _relieve(self, lane: Lane, now_s: float) -> list[Effect]:
        decoding = [
            listed
            for listed in lane.report.sequences
            if listed.state is SequenceState.DECODING and listed.gateway_id
        ]
        needed_blocks = len(decoding) * self._growth_blocks(lane) - lane.report.capacity.plannable_blocks
        if lane.sync is not Sync.IN_STEP or needed_blocks <= 0 or len(decoding) < 2:
            return []
        self._next_s[lane.worker_id] = now_s + self._rules.interval_s
        target = self._roomiest(lane)
        victim = self._victim(lane)
        relief = next_relief(
            self._pressure(lane, decoding, needed_blocks, target, victim), self._rules.switched_off
        )
        rung = "wait" if relief.chosen is None else str(relief.chosen.rung)
        self.decisions[rung] = self.decisions.get(rung, 0) + 1
        effects: list[Effect] = [NoteRelief(lane.worker_id, relief)]
        is_move = relief.chosen is not None and relief.chosen.rung is Rung.MIGRATE
        if is_move and target is not None and victim is not None:
            is_cheap = relief.chosen is not None and relief.chosen.reason == BY_KV
            mode = MoveMode.KV if is_cheap else MoveMode.TOKENS
            order = SequenceMove(ref=victim[0].ref, target=target.worker_id, mode=mode)
            try:
                effects += self._moves.begin(order, now_s)
            except InvalidRequest:
                self.decisions["refused"] = self.decisions.get("refused", 0) + 1
        return effects

    def _growth_blocks(self, lane: Lane) -> int:
        """Of each that decodes, within the time that relief takes to come."""
        step_s, size = lane.report.decode_step_s, lane.report.block_tokens
        steps = self._rules.ahead_s / step_s if step_s > 0 else 1.0
        return max(1, round(steps / size))

    def _pressure(
        self,
        lane: Lane,
        decoding: list[SequenceReport],
        needed_blocks: int,
        target: Lane | None,
        victim: tuple[Sequence, SequenceReport] | None,
    ) -> Pressure:
        report = lane.report
        ends = sorted(self._ends_within(decoding))
        within, freed = ends[0] if ends else (None, 0)
        return Pressure(
            needed_blocks=needed_blocks,
            block_tokens=report.block_tokens,
            running=len(decoding),
            horizon_steps=self._rules.horizon_steps if within is None else within,
            speeds=_speeds(report, target),
            evictable_blocks=report.capacity.evictable_blocks,
            growable_blocks=report.capacity.growable_blocks,
            neighbour=_neighbour(report, target),
            victim=None
            if victim is None
            else Victim(
                blocks=victim[1].allocated_blocks,
                tokens=victim[1].prompt_tokens + victim[1].generated_tokens,
                remaining_tokens=victim[1].max_tokens - victim[1].generated_tokens,
            ),
            frees_within_steps=within,
            frees_blocks=freed,
        )

    def _ends_within(self, decoding: list[SequenceReport]) -> Iterator[tuple[int, int]]:
        """Steps until each of them ends, as far as that was predicted, and the blocks it has."""
        for listed in decoding:
            sequence = self._roster.find(listed.ref)
            if sequence is not None and sequence.prediction is not None:
                steps = max(1, sequence.prediction.rl_tokens - listed.generated_tokens)
                yield steps, listed.allocated_blocks

    def _victim(self, lane: Lane) -> tuple[Sequence, SequenceReport] | None:
        """The last to have come of those that can be moved."""
        found = [
            (sequence, listed)
            for listed in lane.report.sequences
            if (sequence := self._roster.find(listed.ref)) is not None
            and sequence.phase is Phase.DECODING
            and sequence.worker_id == lane.worker_id
            and not self._moves.is_moving(sequence.key)
        ]
        return max(found, key=lambda pair: pair[0].order, default=None)

    def _roomiest(self, lane: Lane) -> Lane | None:
        others = [
            other for other in self._roster.lanes.values() if other is not lane and other.sync is Sync.IN_STEP
        ]
        return max(others, key=lambda other: (_room(other), other.worker_id), default=None)


def _speeds(report: WorkerReported, target: Lane | None) -> Speeds:
    """As both workers measured; what nobody measured is 0."""
    link_bytes_per_s = 0.0
    if target is not None:
        link_bytes_per_s = target.report.link_bytes_per_s.get(report.worker_id, 0.0)
    return Speeds(
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s,
        host_blocks_per_s=1.0 / report.host_block_s if report.host_block_s > 0 else 0.0,
        link_blocks_per_s=link_bytes_per_s / report.kv_block_bytes if report.kv_block_bytes else 0.0,
    )


def _neighbour(report: WorkerReported, target: Lane | None) -> Neighbour:
    if target is None:
        return Neighbour()
    is_linked = bool(report.kv_block_bytes) and report.fingerprint == target.report.fingerprint
    return Neighbour(
        lendable_blocks=target.report.capacity.loanable_blocks,
        room_blocks=_room(target),
        is_linked=is_linked,
    )


def _room(lane: Lane) -> int:
    """Blocks for one more, beside one for each that decodes there."""
    decoding = sum(listed.state is SequenceState.DECODING for listed in lane.report.sequences)
    return max(0, lane.report.capacity.plannable_blocks - 2 * decoding - 1)
