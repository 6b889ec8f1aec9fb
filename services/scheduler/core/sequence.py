"""A sequence as the scheduler knows it, and the one table of what may become of it.

The scheduler's state is soft: all of it is rebuilt from heartbeats, snapshots and resubmissions. Phases are
those of the *projection*: a plan that was sent counts as run. Knows nothing of policies, messages in flight
or time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.scheduler.policy.contract import Task, priority_in
from services.scheduler.policy.fleet_queue import NO_RANK, Rank
from shared.blocks import chain, root
from shared.errors import InternalError
from shared.messages.commands import LengthPrediction
from shared.messages.prefixes import MOST_CHAIN_BLOCKS, PrefixChain
from shared.messages.reports import WorkerReported
from shared.messages.sequence import NOBODY, TOKEN_BYTES, SequenceKey, SequenceRef, SequenceSpec, Tenant


class Phase(StrEnum):
    QUEUED = "queued"
    """Accepted; placement has not named a worker."""
    PLACED = "placed"
    """Its worker's policy has it; the worker has not heard of it."""
    WAITING = "waiting"
    """Held by the worker without KV: preempted, or adopted before its first chunk."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"
    """The worker said so; the tokens are the gateway's affair."""
    CANCELLED = "cancelled"
    """By its gateway, or because the gateway is gone."""
    LOST = "lost"
    """Its worker is gone, or does not have it any more; the gateway submits it again."""
    REPLACED = "replaced"
    """A higher attempt has taken its place."""
    DROPPED = "dropped"
    """Given up: it can run on no worker, or it broke every plan it was in."""


HELD = frozenset({Phase.WAITING, Phase.PREFILLING, Phase.DECODING})
"""A start was sent to the worker, or the worker reported it."""
OVER = frozenset({Phase.ENDED, Phase.CANCELLED, Phase.LOST, Phase.REPLACED, Phase.DROPPED})

_LEAVE = {
    Phase.ENDED: "worker reports the end",
    Phase.CANCELLED: "cancelled, or gateway gone",
    Phase.LOST: "worker gone",
    Phase.REPLACED: "higher attempt",
    Phase.DROPPED: "given up",
}
_ADOPT = "found at a worker"

TRANSITIONS: dict[tuple[Phase, Phase], str] = {
    (Phase.QUEUED, Phase.PLACED): "placement names a worker",
    (Phase.QUEUED, Phase.WAITING): _ADOPT,
    (Phase.QUEUED, Phase.PREFILLING): _ADOPT,
    (Phase.QUEUED, Phase.DECODING): _ADOPT,
    (Phase.PLACED, Phase.QUEUED): "worker gone before the start",
    (Phase.PLACED, Phase.WAITING): _ADOPT,
    (Phase.PLACED, Phase.PREFILLING): "first chunk planned, or found at a worker",
    (Phase.PLACED, Phase.DECODING): _ADOPT,
    (Phase.WAITING, Phase.PLACED): "the start never arrived",
    (Phase.WAITING, Phase.PREFILLING): "chunk planned",
    (Phase.WAITING, Phase.DECODING): "a preemption did not happen",
    (Phase.PREFILLING, Phase.PLACED): "the start never arrived",
    (Phase.PREFILLING, Phase.WAITING): "preempted",
    (Phase.PREFILLING, Phase.DECODING): "last chunk planned",
    (Phase.DECODING, Phase.PLACED): "the start never arrived",
    (Phase.DECODING, Phase.WAITING): "preempted",
    (Phase.DECODING, Phase.PREFILLING): "the last chunk did not run",
    **{(phase, over): why for phase in sorted(HELD) for over, why in _LEAVE.items()},
    **{(phase, over): why for phase in (Phase.QUEUED, Phase.PLACED) for over, why in _LEAVE.items()},
}
"""(from, to) → why. Nothing else is legal; an over sequence never comes back."""


def mermaid() -> str:
    """The table as a mermaid state diagram; the ways out of the three held phases are drawn once, from
    their box."""
    lines = ["stateDiagram-v2", "    [*] --> queued: submitted", "    [*] --> held: found at a worker"]
    lines += ["    state held {", *(f"        {phase}" for phase in sorted(HELD)), "    }"]
    drawn: set[tuple[str, str, str]] = set()
    for (old, new), why in TRANSITIONS.items():
        shared_way = old in HELD and (new in OVER or new is Phase.PLACED)
        edge = ("held" if shared_way else str(old), str(new), why)
        if edge not in drawn:
            drawn.add(edge)
            lines.append(f"    {edge[0]} --> {edge[1]}: {edge[2]}")
    return "\n".join([*lines, *(f"    {phase} --> [*]" for phase in sorted(OVER))]) + "\n"


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of one sequence. Without `spec` when it was adopted and its gateway has not resubmitted
    it yet."""

    ref: SequenceRef
    gateway_id: str
    gateway_incarnation: int
    """0 while unknown (adopted)."""
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int
    """When it was handed over: at submission, or in the last snapshot of its worker."""
    arrival_s: float
    """When the gateway accepted it, on this scheduler's clock."""
    accepted_s: float
    """When this scheduler first heard of it."""
    phase: Phase
    deadline_s: float | None = None
    spec: SequenceSpec | None = None
    worker_id: str | None = None
    confirmed: bool = False
    """The worker is known to have taken the start up."""
    is_asked_for: bool = False
    """Placement was asked for a place, or told of one: its books may keep that."""
    prediction: LengthPrediction | None = None
    rank: Rank = NO_RANK
    """Its place by the policy's order, as of when it got its worker."""
    faults: int = 0
    """Resyncs it has caused since its worker last ran smoothly."""
    started_s: float | None = None
    """When its first chunk was planned."""
    priority: int = 0
    """As `Task.priority`, among its tenant's. Of an adopted one 0, until its gateway says what it is."""
    level: int = 0
    """The same at its worker, among all."""
    tenant: Tenant = NOBODY
    """Like the priority."""
    cached_tokens: int = 0
    """Of what it began with, as its worker said."""
    expected_tokens: int | None = None
    """The same, as placement foresaw it; None: it was not asked."""
    prefixes: tuple[tuple[tuple[bytes, int], ...], tuple[PrefixChain, ...]] | None = None
    """Names of its prompt's blocks, and the kinds of workers that call them so (`names_of`)."""

    @property
    def key(self) -> SequenceKey:
        return self.ref.key

    @property
    def limit_tokens(self) -> int:
        """Prompt and longest answer."""
        return self.prompt_tokens + self.max_tokens

    @property
    def order(self) -> tuple[float, SequenceKey]:
        return (self.arrival_s, self.ref.key)

    def move_to(self, phase: Phase) -> None:
        """Raises InternalError on a transition that the table does not list."""
        if phase is not self.phase:
            if (self.phase, phase) not in TRANSITIONS:
                raise InternalError(f"{self.ref} cannot go from {self.phase} to {phase}")
            self.phase = phase

    def note_spec(self, spec: SequenceSpec) -> None:
        """What only its gateway knows."""
        self.spec, self.gateway_incarnation = spec, spec.gateway_incarnation
        self.priority = self.level = priority_in(spec.tenant.service_class, spec.priority)
        self.tenant = spec.tenant

    def task(self, *, is_open: bool = False) -> Task:
        """What a policy is told of it. `is_open`: with the tokens that may still come before it starts."""
        open_tokens = self.spec.open_tokens if is_open and self.spec is not None else 0
        return Task(
            self.ref.key,
            self.prompt_tokens,
            self.max_tokens,
            self.arrival_s,
            self.generated_tokens + open_tokens,
            self.deadline_s,
            self.prediction,
            self.level,
        )

    @classmethod
    def from_spec(cls, spec: SequenceSpec, now_s: float) -> "Sequence":
        """As submitted."""
        sequence = cls(
            ref=spec.ref,
            gateway_id=spec.gateway_id,
            gateway_incarnation=spec.gateway_incarnation,
            prompt_tokens=spec.prompt_tokens,
            max_tokens=spec.sampling.max_tokens,
            generated_tokens=spec.generated_tokens,
            arrival_s=now_s - spec.waited_s,
            accepted_s=now_s,
            phase=Phase.QUEUED,
            deadline_s=None if spec.deadline_in_s is None else now_s + spec.deadline_in_s,
        )
        sequence.note_spec(spec)
        return sequence


MOST_KINDS = 4
"""Of workers whose names travel with one prompt."""

Kind = tuple[bytes, int]
"""Fingerprint, tokens in a block."""


def kinds_of(reports: Iterable[WorkerReported]) -> tuple[Kind, ...]:
    """Of the workers that share blocks, each once, in an order that does not depend on theirs."""
    kinds = {(report.fingerprint, report.block_tokens) for report in reports if report.caches_prefixes}
    return tuple(sorted(kinds)[:MOST_KINDS])


def names_of(sequence: Sequence, kinds: tuple[Kind, ...]) -> tuple[PrefixChain, ...]:
    """Computed once for the same kinds; nothing for a sequence whose prompt is not known."""
    if sequence.spec is None or not kinds:
        return ()
    known = sequence.prefixes
    if known is None or known[0] != kinds:
        known = sequence.prefixes = (kinds, tuple(_chain(sequence.spec, kind) for kind in kinds))
    return known[1]


def _chain(spec: SequenceSpec, kind: Kind) -> PrefixChain:
    fingerprint, block_tokens = kind
    most_bytes = MOST_CHAIN_BLOCKS * block_tokens * TOKEN_BYTES
    names = chain(root(fingerprint, spec.cache_salt), spec.prompt[:most_bytes], block_tokens)
    return PrefixChain(block_tokens=block_tokens, names=b"".join(names))
