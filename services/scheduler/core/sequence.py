"""A sequence as the scheduler knows it, and the table of its phases, which describe the *projection*.

The state is soft: heartbeats, snapshots and resubmissions rebuild it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    QUEUED = "queued"  # accepted; placement has not chosen a worker
    PLACED = "placed"  # in its worker's policy; the worker has not received it
    WAITING = "waiting"  # held by the worker without KV: preempted, or adopted before its first chunk
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"  # the worker reported the end and gives the tokens to the gateway
    CANCELLED = "cancelled"  # cancelled by its gateway, or because the gateway is gone
    LOST = "lost"  # the worker is gone or no longer has it; the gateway resubmits it
    REPLACED = "replaced"  # replaced by a higher attempt
    DROPPED = "dropped"  # given up: it can run on no worker, or it broke every plan it was in


HELD = frozenset({Phase.WAITING, Phase.PREFILLING, Phase.DECODING})
"""The worker was sent a start, or reported the sequence."""
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
"""(from, to) → reason. No other transition is legal; a finished sequence never returns."""


def mermaid() -> str:
    """Return the table as a mermaid state diagram. Exits that the three held phases share are drawn once."""
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
    """One attempt of a sequence. An adopted one has no `spec` until its gateway resubmits it."""

    ref: SequenceRef
    gateway_id: str
    gateway_incarnation: int  # 0 while unknown (adopted)
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int  # answer tokens at submission, or in the worker's last snapshot
    arrival_s: float  # time at which the gateway accepted it, on this scheduler's clock
    accepted_s: float  # time at which this scheduler first received it
    phase: Phase
    deadline_s: float | None = None
    spec: SequenceSpec | None = None
    worker_id: str | None = None
    confirmed: bool = False  # whether the worker is known to have the start
    is_asked_for: bool = False  # whether placement knows of it and may reserve a place
    prediction: LengthPrediction | None = None
    rank: Rank = NO_RANK  # rank in the policy's order when it got its worker
    faults: int = 0  # number of resyncs it caused since its worker last ran smoothly
    started_s: float | None = None  # time at which its first chunk was planned
    priority: int = 0
    """`Task.priority` within its tenant; 0 for an adopted one until its gateway reports."""
    level: int = 0  # `Task.priority` at its worker, across tenants
    tenant: Tenant = NOBODY  # unknown like `priority` for an adopted one
    cached_tokens: int = 0  # tokens it reused from the prefix cache, as its worker reported
    expected_tokens: int | None = None
    """Cached tokens that placement expected; None if placement was not asked."""
    prefixes: tuple[tuple[tuple[bytes, int], ...], tuple[PrefixChain, ...]] | None = None
    """Block names of its prompt, and the kinds of workers they are for (`names_of`)."""

    counts: Counter[Phase] | None = None
    """Number of sequences by phase, in which this one counts."""
    key: SequenceKey = field(init=False)
    limit_tokens: int = field(init=False)
    """Tokens of the prompt and the longest answer."""
    order: tuple[float, SequenceKey] = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.ref.key
        self.limit_tokens = self.prompt_tokens + self.max_tokens
        self.order = (self.arrival_s, self.key)

    def move_to(self, phase: Phase) -> None:
        """Enter a phase. Raises InternalError for a transition that the table does not list."""
        if phase is not self.phase:
            if (self.phase, phase) not in TRANSITIONS:
                raise InternalError(f"{self.ref} cannot go from {self.phase} to {phase}")
            if self.counts is not None:
                self.counts[self.phase] -= 1
                self.counts[phase] += 1
            self.phase = phase

    def note_spec(self, spec: SequenceSpec) -> None:
        """Store what only the gateway knows."""
        self.spec, self.gateway_incarnation = spec, spec.gateway_incarnation
        self.priority = self.level = priority_in(spec.tenant.service_class, spec.priority)
        self.tenant = spec.tenant

    def task(self, *, is_open: bool = False) -> Task:
        """Return the policy's view. `is_open`: include tokens that may still come before the start."""
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
            min(self.expected_tokens or 0, self.prompt_tokens),
        )

    @property
    def runs_alone(self) -> bool:
        return self.spec is not None and self.spec.runs_alone

    @property
    def is_bound(self) -> bool:
        return self.spec is not None and self.spec.is_bound

    @property
    def likely_tokens(self) -> int:
        """Return the tokens that its KV will probably have at its end."""
        answer = self.max_tokens if self.prediction is None else self.prediction.p50_tokens
        return min(self.limit_tokens, self.prompt_tokens + max(answer, self.generated_tokens))

    @classmethod
    def from_spec(cls, spec: SequenceSpec, now_s: float) -> "Sequence":
        """Return a submitted sequence."""
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
"""Maximum number of worker kinds whose block names travel with one prompt."""

Kind = tuple[bytes, int]
"""Fingerprint and tokens per block."""


def kinds_of(reports: Iterable[WorkerReported]) -> tuple[Kind, ...]:
    """Return each kind of worker that shares blocks, once, in a stable order."""
    kinds = {(report.fingerprint, report.block_tokens) for report in reports if report.caches_prefixes}
    return tuple(sorted(kinds)[:MOST_KINDS])


def names_of(sequence: Sequence, kinds: tuple[Kind, ...]) -> tuple[PrefixChain, ...]:
    """Return the prompt's block names for each kind, cached; empty if the prompt is unknown."""
    if sequence.spec is None or not kinds:
        return ()
    known = sequence.prefixes
    if known is None or known[0] != kinds:
        chains: list[PrefixChain] = []
        for fingerprint, block_tokens in kinds:
            begins = sequence.spec.prompt[: MOST_CHAIN_BLOCKS * block_tokens * TOKEN_BYTES]
            names = chain(root(fingerprint, sequence.spec.cache_salt), begins, block_tokens)
            chains.append(PrefixChain(block_tokens=block_tokens, names=b"".join(names)))
        known = sequence.prefixes = (kinds, tuple(chains))
    return known[1]
