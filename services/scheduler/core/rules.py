"""The numbers by which the core decides; configuration fills them in."""

from dataclasses import dataclass, field

from services.scheduler.policy.contract import PolicySettings, QueueOrder
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from services.scheduler.policy.relief import Rung

PLACEMENT_BATCH = 64
"""Sequences that one question to placement is about, at most."""


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Limits of live migrations: how many at once, how often they are prepared, how long they may take."""

    deadline_s: float = 20.0
    """From the order to the gateway being told; then the sequence stays where it is."""
    switch_s: float = 2.0
    """The gateway and the target have so long for the switch."""
    last_tokens: int = 8
    """That the source may be ahead of a rehearsal at the switch: they are computed in the pause."""
    most_rounds: int = 4
    """Rehearsals; the last one is followed by the switch, however far the source has got."""
    most_at_once: int = 16
    open_tokens: int = 12
    """Of the source that still count after the gateway was told, and that the target takes up."""


@dataclass(frozen=True, slots=True)
class ReliefRules:
    """Whether and when the relief ladder is climbed, and which of its rungs are switched off."""

    enabled: bool = False
    switched_off: frozenset[Rung] = frozenset()
    interval_s: float = 0.5
    """Between two decisions about one worker."""
    ahead_s: float = 0.3
    """Memory counts as short when it lasts no longer than that."""
    hold_s: float = 30.0
    """For so long a worker borrows nothing ahead of need once another rung was found cheaper."""
    horizon_steps: int = 100
    """Blocks are taken to be needed for so long where no end is predicted."""


@dataclass(frozen=True, slots=True)
class ShadowRules:
    """Which running sequences are copied to other workers, and how often."""

    from_s: float = 0.0
    """Those whose computation would take so long again; 0: none."""
    interval_s: float = 0.3
    """Between two looks at one worker, and two orders for one sequence."""
    renew_s: float = 5.0
    """A keeper hears at least so often of a sequence that it has all of."""
    valid_for_s: float = 2.0
    """An order is over by then; what is left is the next one's."""
    answer_s: float = 15.0
    """An order of which nobody has said anything for so long is over."""
    aside_s: float = 5.0
    """For so long nothing goes where an order failed, or brought nothing."""
    rest: float = 3.0
    """A worker rests so many times as long as an order took, before it is looked at again."""


@dataclass(frozen=True, slots=True)
class OversizedRules:
    """Of sequences that are larger than their worker has become."""

    wait_s: float = 10.0
    """For a worker that could not even borrow enough: so long it may take until it grows again."""
    gather_s: float = 60.0
    """For one that may borrow, from the sequence's turn on."""


@dataclass(frozen=True, slots=True)
class Rules:
    """All times in seconds on one monotonic clock."""

    settings: PolicySettings = field(default_factory=PolicySettings)
    outstanding_steps: int = 2
    """Steps a worker should have left, the running one included, before the next plan is made."""
    ahead_s: float = 0.008
    """Where steps are short, so much time ahead instead, in plans that an arrival may cut short."""
    valid_for_s: float = 5.0
    worker_timeout_s: float = 2.0
    gateway_timeout_s: float = 10.0
    round_s: float = 0.6
    """What a new scheduler waits for heartbeats before its first command."""
    snapshot_patience_s: float = 10.0
    """A worker that sends heartbeats but answers no snapshot for so long counts as lost."""
    snapshot_retry_s: float = 0.1
    placement_interval_s: float = 0.05
    placement_batch: int = PLACEMENT_BATCH
    queue: QueueOrder | None = None
    """In which order sequences wait for a worker; None: as the batching policy wants it."""
    feed_sequences: int = FEED_SEQUENCES
    """So many may wait at a worker without memory for them; 0: a worker is given where memory is free."""
    max_queued: int = 4096
    """Sequences that no worker holds yet; resumed ones may exceed it twofold."""
    refuse_wait_s: float = 0.0
    """A new request for which a longer wait is foreseen is refused; 0: never for that."""
    max_start_bytes: int = 262_144
    """Token ids of one sequence, packed; more cannot be sent to a worker in one message."""
    max_faults: int = 4
    """Resyncs that one sequence may cause before it is given up."""
    tombstone_s: float = 60.0
    ended_s: float = 30.0
    """How long a resubmission of an ended attempt is answered with `known`."""
    report_grace_s: float = 0.25
    """A step report may arrive so much later than a heartbeat that counts it."""
    plan_grace_s: float = 1.0
    """A plan that a worker's heartbeat does not know after so long was lost on the way."""
    moves: MoveRules = field(default_factory=MoveRules)
    relief: ReliefRules = field(default_factory=ReliefRules)
    shadows: ShadowRules = field(default_factory=ShadowRules)
    oversized: OversizedRules = field(default_factory=OversizedRules)
