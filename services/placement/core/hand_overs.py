"""Selects answers to move off the workers that computed their prompts, and their targets. Pure.

Candidates are the sequences of `prefill` workers that decode, or whose prompt is being computed: their KV
transfer starts early. Each goes to the decoding worker where it finishes first (`FleetRoles.hand_over`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.placement.core.fleet import FleetCapacity, WorkerRoom
from services.placement.core.move_mode import link_bytes_per_s
from services.placement.core.roles import FleetRoles, HandOver, Landing, Role, WorkerLoad
from shared.messages.reports import WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef

_FORGET_S = 30.0
_LEFT_ALONE_S = 0.5
_BEGINS_S = 0.03
"""Time within which a worker without other prompts starts one."""
_MOST_UNDER_WAY = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """A decision on one sequence, to hand it over or not, with the estimated costs."""

    ref: SequenceRef
    source: str
    tokens: int
    choice: HandOver


@dataclass(frozen=True, slots=True)
class _UnderWay:
    target: str
    blocks: int
    since_s: float


def load_of(worker: WorkerRoom, now_s: float) -> WorkerLoad:
    """Return a worker's load, as roles use it."""
    report = worker.report
    contexts = [resident.tokens for resident in worker.residents.values() if resident.decodes]
    return WorkerLoad(
        worker_id=report.worker_id,
        memory_tokens=report.capacity.total_blocks * report.block_tokens,
        context_tokens=sum(contexts),
        decoding=len(contexts),
        pending_tokens=worker.pending_tokens(now_s),
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s,
        link_tokens_per_s=_link_tokens_per_s(report),
        prefill_context_tokens=report.prefill_context_tokens,
    )


def _ref(key: SequenceKey, attempt: int) -> SequenceRef:
    return SequenceRef(request_id=key[0], choice=key[1], attempt=attempt)


def _only_prompt(worker: WorkerRoom, now_s: float) -> tuple[SequenceRef, int] | None:
    """Return the worker's only prompt and its tokens if it has started by now, else None. It has if the last
    heartbeat lists it, or if it was placed `_BEGINS_S` ago."""
    prompts = [key for key, resident in worker.residents.items() if not resident.decodes]
    if len(prompts) + len(worker.reservations) != 1:
        return None
    for key, reserved in worker.reservations.items():
        is_there = now_s - reserved.placed_s >= _BEGINS_S
        return (_ref(key, reserved.attempt), reserved.tokens) if is_there else None
    resident = worker.residents[prompts[0]]
    return (_ref(prompts[0], resident.attempt), resident.tokens) if resident.is_read else None


def _link_tokens_per_s(report: WorkerReported, source: str = "") -> float:
    """Return the tokens whose KV it fetches per second from `source`, or from a source not measured."""
    if not report.kv_block_bytes:
        return 1.0
    return max(1.0, link_bytes_per_s(report, source) * report.block_tokens / report.kv_block_bytes)


class HandOvers:
    """Hand-overs under way. Call `on_over` for every one that ended or was refused."""

    def __init__(self, fleet: FleetCapacity, roles: FleetRoles) -> None:
        self._fleet = fleet
        self._roles = roles
        self._under_way: dict[SequenceKey, _UnderWay] = {}
        self._left_alone: dict[SequenceRef, float] = {}
        """Time until which a sequence is skipped."""

    def __len__(self) -> int:
        return len(self._under_way)

    def on_over(self, ref: SequenceRef, failed: bool, now_s: float) -> None:
        """Record that a hand-over ended; a failed one is skipped for a while."""
        self._under_way.pop(ref.key, None)
        if failed:
            self._left_alone[ref] = now_s + _LEFT_ALONE_S

    def next(self, now_s: float) -> list[Wanted]:
        """Return the decisions to act on now, at intervals also those to stay (without target)."""
        for key, under_way in list(self._under_way.items()):
            if now_s - under_way.since_s > _FORGET_S:
                del self._under_way[key]
        self._left_alone = {ref: until_s for ref, until_s in self._left_alone.items() if until_s > now_s}
        found = []
        for worker, ref, tokens in self._leaving(now_s):
            if ref.key in self._under_way or now_s < self._left_alone.get(ref, now_s):
                continue
            if len(self._under_way) >= _MOST_UNDER_WAY:
                break
            landings = list(self._landings(worker, tokens, now_s))
            choice = self._roles.hand_over(tokens, load_of(worker, now_s), landings)
            if choice.worker_id is None:
                self._left_alone[ref] = now_s + _LEFT_ALONE_S
            else:
                blocks = self._fleet.workers[choice.worker_id].blocks(tokens) + 1
                self._under_way[ref.key] = _UnderWay(choice.worker_id, blocks, now_s)
            found.append(Wanted(ref, worker.report.worker_id, tokens, choice))
        return found

    def _leaving(self, now_s: float) -> Iterator[tuple[WorkerRoom, SequenceRef, int]]:
        """Yield (worker, sequence, tokens) on prefill workers: decoding ones first, then started prompts."""
        fleet, roles = self._fleet.workers, self._roles
        workers = [worker for name, worker in fleet.items() if roles.role_of(name) is Role.PREFILL]
        for begun_only in (False, True):
            for worker in workers:
                for key, resident in worker.residents.items():
                    is_begun = not resident.decodes and 0 < resident.pending_tokens < resident.tokens
                    if resident.is_read and (is_begun if begun_only else resident.decodes):
                        yield worker, _ref(key, resident.attempt), resident.tokens
        for worker in workers:
            if (alone := _only_prompt(worker, now_s)) is not None:
                yield worker, *alone

    def _landings(self, source: WorkerRoom, tokens: int, now_s: float) -> Iterator[Landing]:
        for name, worker in self._fleet.workers.items():
            report = worker.report
            is_other = worker is not source and report.fingerprint == source.report.fingerprint
            if not is_other or not self._roles.role_of(name).may_decode:
                continue
            coming = sum(one.blocks for one in self._under_way.values() if one.target == name)
            if worker.free_blocks - coming >= worker.blocks(tokens) + 2:
                rate = _link_tokens_per_s(report, source.report.worker_id)
                yield Landing(load_of(worker, now_s), coming * report.block_tokens / rate)
