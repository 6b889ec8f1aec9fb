"""Limits and times by which the core decides. All times are seconds of one monotonic clock."""

from dataclasses import dataclass, field

from services.scheduler.policy.contract import PolicySettings, QueueOrder
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES

PLACEMENT_BATCH = 64
"""Maximum number of sequences in one question to placement."""


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Limits of live migrations."""

    deadline_s: float = 20.0  # from the order to the gateway's notice
    switch_s: float = 2.0  # for the gateway and the target to switch
    last_tokens: int = 8  # that the source may be ahead of a rehearsal at the switch, which computes them
    most_rounds: int = 4  # rehearsals; the switch follows the last one in any case
    most_at_once: int = 16
    open_tokens: int = 12  # that the source may still add after the gateway was notified


@dataclass(frozen=True, slots=True)
class ReliefRules:
    """Settings of the relief ladder."""

    enabled: bool = False
    switched_off: frozenset[str] = frozenset()
    interval_s: float = 0.5  # between two decisions about one worker
    ahead_s: float = 0.3  # memory is short if it lasts no longer than this
    hold_s: float = 30.0  # without borrowing in advance once another rung was cheaper
    horizon_steps: int = 100  # for which blocks are needed where no end is predicted


@dataclass(frozen=True, slots=True)
class OversizedRules:
    """Patience with sequences that no longer fit their worker."""

    wait_s: float = 10.0  # for a worker to grow again where borrowing could not suffice
    gather_s: float = 60.0  # for a worker that may borrow, from the sequence's turn on


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one core."""

    settings: PolicySettings = field(default_factory=PolicySettings)
    sized_by_workers: bool = False  # batches are as large as a worker's device carries, if it tells
    outstanding_steps: int = 2  # least steps left at a worker, the running one included, before the next plan
    ahead_s: float = 0.008  # least time ahead where steps are short; an arrival may cut such plans
    valid_for_s: float = 5.0  # after which a worker gives up a plan; more where steps are slower
    worker_timeout_s: float = 2.0
    gateway_timeout_s: float = 10.0
    round_s: float = 0.6  # for which a new scheduler collects heartbeats before its first command
    snapshot_patience_s: float = 10.0  # after which a worker that answers no snapshot counts as lost
    snapshot_retry_s: float = 0.1
    placement_interval_s: float = 0.05
    placement_batch: int = PLACEMENT_BATCH
    queue: QueueOrder | None = None  # order of sequences without a worker; None: the batching policy's
    feed_sequences: int = FEED_SEQUENCES  # that may wait at a worker without free memory
    max_queued: int = 4096  # sequences that no worker holds yet; resumed ones may use twice the limit
    refuse_wait_s: float = 0.0  # a new request with a longer expected wait is refused; 0: never
    max_start_bytes: int = 262_144  # packed token ids of one sequence that fit one message to a worker
    max_faults: int = 4  # resyncs that one sequence may cause before it is given up
    tombstone_s: float = 60.0
    ended_s: float = 30.0  # for which a resubmission of an ended attempt gets the answer `known`
    report_grace_s: float = 0.25  # by which a step report may follow a heartbeat that counts it
    plan_grace_s: float = 1.0  # after which a plan missing from the worker's heartbeats counts as lost
    moves: MoveRules = field(default_factory=MoveRules)
    relief: ReliefRules = field(default_factory=ReliefRules)
    shadow_from_s: float = 0.0  # recompute time that starts shadow copies; 0: none. The service's: config.py
    oversized: OversizedRules = field(default_factory=OversizedRules)
