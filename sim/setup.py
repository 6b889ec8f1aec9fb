"""What a simulation is given, and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.placement.core.roles import FleetRoles
from services.placement.policy.contract import PlacementPolicy
from services.scheduler.policy.contract import PolicySettings, QueueOrder, WorkerShape
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from services.worker.core.costs.base import CostModel
from shared.messages.sequence import SequenceKey
from sim.cores import CoreCosts
from sim.handover import Wire
from sim.meters import WorkerMeter
from sim.predictors import SimPredictor
from sim.requests import ServedRecord
from sim.routers import LeastWork


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything but the requests."""

    policy: str
    shape: WorkerShape
    settings: PolicySettings
    cost: CostModel
    predictor: SimPredictor
    workers: int = 1
    router: PlacementPolicy = field(default_factory=LeastWork)
    queue: QueueOrder | None = None
    """In which order requests wait for a worker; None: as the policy wants it."""
    places: int = FEED_SEQUENCES
    """So many may wait at a worker without memory for them; 0: a request is placed where memory is free."""
    outstanding_steps: int = 2
    ahead_s: float = 0.0
    """Where steps are short, plans reach so far ahead; the live scheduler's value is 0.008."""
    prediction_delay_s: float = 0.0
    """0: the prediction is there when the request arrives."""
    cache_blocks: int = 0
    """Each worker keeps so many blocks of prompts, of the trace's own size; 0: none."""
    cache_block_tokens: int = 512
    eviction: str = "lru"
    """Which of them goes first, by name (`services/worker/kv/core/eviction.py`)."""
    step_ends_s: Sequence[Sequence[float]] = ()
    """By worker, when the steps of a run that is replayed ended (`sim/replay.py`)."""
    placed: Mapping[SequenceKey, int] = field(default_factory=dict)
    """Where requests went in such a run: whoever gets a worker gets that one."""
    found_tokens: Mapping[SequenceKey, int] = field(default_factory=dict)
    """Of prompts, what was found in a cache in such a run."""
    roles: FleetRoles | None = None
    """None: every worker does both."""
    cores: CoreCosts | None = None
    """All workers on one machine's cores, with everything else; None: each has cores of its own."""
    wire: Wire = field(default_factory=Wire)
    """For hand-overs."""
    warm_s: float = 0.0
    """Times between tokens are measured from then on."""
    is_checked: bool = False
    """Call the policy's own `check_integrity` after every event: slow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, drained."""

    records: list[ServedRecord]
    meters: list[WorkerMeter]
    shape: WorkerShape
    end_s: float
