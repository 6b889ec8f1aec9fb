"""Adoption: making the scheduler's picture of one worker agree with what its snapshot says it holds. Pure.

What runs there goes on; attempts that were cancelled, replaced, given up or live elsewhere are dropped;
starts that never arrived are placed again. The same for a first contact, a restart of the scheduler and a
resync.
"""

from services.scheduler.core.effects import Effect
from services.scheduler.core.roster import Roster
from services.scheduler.core.sequence import HELD, Phase, Sequence
from services.scheduler.core.worker_pipeline import WorkerPipeline, planned_capacity_blocks
from services.scheduler.policy.contract import Holding, PolicyFactory, WorkerShape
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported

_PHASES = {
    SequenceState.WAITING: Phase.WAITING,
    SequenceState.PREFILLING: Phase.PREFILLING,
    SequenceState.DECODING: Phase.DECODING,
}


def adopt_snapshot(
    roster: Roster,
    pipeline: WorkerPipeline,
    snapshot: WorkerReported,
    make_policy: PolicyFactory,
    now_s: float,
) -> list[Effect]:
    """Brings `pipeline` into step. Every sequence alive there is either in its new policy or dropped by its
    next plan."""
    effects = _note_ends(roster, snapshot, now_s)
    alive = [listed for listed in snapshot.sequences if listed.state is not SequenceState.ENDED]
    adopted: list[tuple[Sequence, SequenceReport]] = []
    stale: list[SequenceReport] = []
    for listed in alive:
        if _is_stale(roster, pipeline, listed, now_s):
            stale.append(listed)
            continue
        older = roster.sequences.get(listed.ref.key)
        if older is not None and older.ref.attempt < listed.ref.attempt:
            effects.append(roster.leave(older, Phase.REPLACED, now_s))
        sequence = roster.find(listed.ref) or _from_report(listed, now_s)
        sequence.generated_tokens = listed.generated_tokens
        roster.adopt(sequence, pipeline, _PHASES[listed.state], now_s)
        adopted.append((sequence, listed))
    effects += _note_missing(roster, pipeline, {sequence.key for sequence, _ in adopted}, now_s)
    policy = make_policy(
        WorkerShape(snapshot.block_tokens, planned_capacity_blocks(snapshot)), roster.rules.settings
    )
    policy.on_measured(snapshot.prefill_tokens_per_s, snapshot.decode_step_s, now_s)
    for sequence, listed in adopted:
        decoding = listed.state is SequenceState.DECODING
        holding = Holding(listed.computed_tokens, listed.allocated_blocks, decoding)
        policy.on_adopted(sequence.task(), holding, now_s)
    pipeline.begin(policy, snapshot, now_s)
    for listed in stale:
        pipeline.drop(listed.ref)
    for sequence in roster.of_worker(pipeline.worker_id):
        if sequence.phase is Phase.PLACED:
            pipeline.arrive(sequence, now_s)
    roster.backlog.poke()
    return effects


def _is_stale(roster: Roster, pipeline: WorkerPipeline, listed: SequenceReport, now_s: float) -> bool:
    """Whether this attempt should not live here (any more)."""
    key, attempt = listed.ref.key, listed.ref.attempt
    cancelled = roster.tombstones.get(key, now_s)
    given_up = roster.dropped.get(key, now_s)
    ended = roster.ended.get(key, now_s)
    if cancelled is not None and attempt <= cancelled:
        return True
    if given_up is not None and attempt <= given_up[0]:
        return True
    if ended is not None and attempt <= ended[0] and ended[1] != pipeline.worker_id:
        return True
    known = roster.sequences.get(key)
    if known is None or known.ref.attempt < attempt:
        return False
    lives_elsewhere = known.phase in HELD and known.confirmed and known.worker_id != pipeline.worker_id
    return known.ref.attempt > attempt or lives_elsewhere


def _from_report(listed: SequenceReport, now_s: float) -> Sequence:
    """Adopted: its spec comes when its gateway resubmits it, and until then is not needed."""
    return Sequence(
        ref=listed.ref,
        gateway_id=listed.gateway_id,
        gateway_incarnation=0,
        prompt_tokens=listed.prompt_tokens,
        max_tokens=listed.max_tokens,
        generated_tokens=listed.generated_tokens,
        arrival_s=now_s - listed.waited_s,
        accepted_s=now_s,
        phase=_PHASES[listed.state],
        deadline_s=None if listed.deadline_in_s is None else now_s + listed.deadline_in_s,
        started_s=now_s,
    )


def _note_ends(roster: Roster, snapshot: WorkerReported, now_s: float) -> list[Effect]:
    """Ends whose report was lost. The worker keeps the tokens for the gateway."""
    effects: list[Effect] = []
    for listed in snapshot.sequences:
        if listed.state is not SequenceState.ENDED:
            continue
        known = roster.sequences.get(listed.ref.key)
        if known is not None and known.ref.attempt > listed.ref.attempt:
            continue
        if known is not None and known.ref == listed.ref and known.worker_id in (None, snapshot.worker_id):
            effects.append(
                roster.leave(
                    known,
                    Phase.ENDED,
                    now_s,
                    reason=listed.finish_reason,
                    generated_tokens=listed.generated_tokens,
                )
            )
        if roster.sequences.get(listed.ref.key) is None:
            roster.ended.put(listed.ref.key, (listed.ref.attempt, snapshot.worker_id), now_s)
    return effects


def _note_missing(
    roster: Roster, pipeline: WorkerPipeline, found: set[tuple[str, int]], now_s: float
) -> list[Effect]:
    """Held there as far as we knew, but not in the snapshot: over, when it had arrived; else the start was
    lost."""
    effects: list[Effect] = []
    for sequence in roster.of_worker(pipeline.worker_id):
        if sequence.phase not in HELD or sequence.key in found:
            continue
        if sequence.confirmed or sequence.spec is None:
            effects.append(roster.leave(sequence, Phase.LOST, now_s))
        else:
            sequence.move_to(Phase.PLACED)
    return effects
