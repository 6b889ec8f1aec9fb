"""Settings and outcome of a simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.placement.core.roles import FleetRoles
from services.placement.policy.contract import PlacementPolicy
from services.scheduler.policy.contract import PolicySettings, QueueOrder, WorkerShape
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from services.worker.core.costs import CostModel
from shared.messages.sequence import SequenceKey
from sim.cores import CoreCosts
from sim.handover import Wire
from sim.meters import WorkerMeter
from sim.predictors import SimPredictor
from sim.requests import ServedRecord
from sim.routers import LeastWork


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a simulation, without its requests."""

    policy: str
    shape: WorkerShape
    settings: PolicySettings
    cost: CostModel
    predictor: SimPredictor
    workers: int = 1
    router: PlacementPolicy = field(default_factory=LeastWork)
    queue: QueueOrder | None = None
    """Order in which requests wait for a worker; None for the policy's own."""
    places: int = FEED_SEQUENCES
    """Sequences that may wait for memory at a worker; 0 to place only where memory is free."""
    outstanding_steps: int = 2
    ahead_s: float = 0.0
    """Time ahead covered by plans of short steps; 0.008 in the live scheduler."""
    refuse_wait_s: float = 0.0
    """Refuse requests with a longer expected wait, as the live scheduler does; 0 to refuse none."""
    prediction_delay_s: float = 0.0
    """0 to have the prediction when the request arrives."""
    cache_blocks: int = 0
    """Prompt blocks in each worker's prefix cache, of the trace's block size; 0 for none."""
    cache_block_tokens: int = 512
    eviction: str = "lru"
    """Eviction order of the prefix cache, by name (`services/worker/kv/core/eviction.py`)."""
    step_ends_s: Sequence[Sequence[float]] = ()
    """Step end times of a replayed run, by worker (`sim/replay.py`)."""
    placed: Mapping[SequenceKey, int] = field(default_factory=dict)
    """Worker of each request in a replayed run; used once the request is placed."""
    found_tokens: Mapping[SequenceKey, int] = field(default_factory=dict)
    """Prompt tokens found in the prefix cache in a replayed run."""
    roles: FleetRoles | None = None
    """None to let every worker prefill and decode."""
    cores: CoreCosts | None = None
    """Cores shared by all workers of one machine; None to give each worker its own."""
    wire: Wire = field(default_factory=Wire)
    """Links for hand-overs."""
    warm_s: float = 0.0
    """Start of the measurement of inter-token gaps."""
    is_checked: bool = False
    """Call the policy's `check_integrity` after every event: slow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run in which every request ended or was refused."""

    records: list[ServedRecord]
    """Served requests."""
    meters: list[WorkerMeter]
    shape: WorkerShape
    end_s: float
    refused: int = 0
