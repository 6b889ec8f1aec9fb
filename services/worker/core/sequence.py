"""A sequence held by this worker: its tokens, how far it is computed, its blocks. No decisions, no tensors.

Legal transitions are one table, `TRANSITIONS`; anything else is a bug here and raises.
"""

from dataclasses import dataclass, field

from services.worker.core.sampling import Sampled
from services.worker.kv.core.arrivals import Awaited
from services.worker.kv.core.block_table import BlockTable, block_table
from services.worker.kv.core.radix_tree import Node
from shared.blocks import BlockHash
from shared.errors import InternalError
from shared.messages.plans import PrefillChunk
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import (
    FinishReason,
    Sampling,
    SequenceRef,
    SequenceSpec,
    unpack_tokens,
)
from shared.messages.tokens import TokenLogprobs
from shared.messages.values import as_seconds

TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILLING, SequenceState.ENDED}),
    SequenceState.PREFILLING: frozenset({SequenceState.DECODING, SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.DECODING: frozenset({SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}
"""From → to. Back to WAITING is a preemption with recomputation."""


@dataclass(slots=True)
class HeldSequence:
    """One attempt of one sequence. `tokens` is the prompt followed by the answer so far."""

    ref: SequenceRef
    gateway_id: str
    gateway_incarnation: int
    sampling: Sampling
    prompt_tokens: int
    tokens: list[int]
    limit_tokens: int
    """Prompt + answer may not exceed this (the answer's limit, or the worker's context)."""
    waited_s: float
    """Since the gateway accepted it, at `received_s`."""
    received_s: float
    deadline_in_s: float | None
    state: SequenceState = SequenceState.WAITING
    alive: bool = True
    """`state` is not ENDED."""
    computed_tokens: int = 0
    """Tokens whose KV is present."""
    blocks: BlockTable = field(default_factory=block_table)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Where wanted: of the last tokens, those sampled in this attempt. The gateway has the others."""
    cache_salt: bytes = b""
    tenant: str = ""
    """Whose it is: what it leaves in the cache is charged to him."""
    names: list[BlockHash] = field(default_factory=list)
    """Of its whole blocks, as far as they were asked for."""
    published_blocks: int = 0
    """So many of its blocks were offered to the prefix cache, or came from there."""
    kept: list[Node] = field(default_factory=list)
    """Its first blocks, while the host keeps them: it was taken off the device and is not back yet."""
    audited: list[int] = field(default_factory=list)
    """Stored blocks that what it computes itself is compared with: the next ones to become full."""
    awaited: Awaited | None = None
    """Stored blocks that follow those in `blocks`, on their way to the device."""
    awaited_until_s: float | None = None
    """Then it goes on without them. None: nobody has looked yet."""
    computes_rest: bool = False
    """A load brought less than it was to: it loads nothing any more."""
    postponed: PrefillChunk | None = None
    """What plans count as computed and is not: it waited for stored blocks."""
    promised_tokens: int = 0
    """A chunk may begin up to here, wherever the computation stands: the scheduler was told that what
    precedes it is stored."""
    cached_tokens: int = 0
    """Of the prompt, those not computed for the first token of this attempt, because they were stored."""
    sampled: bool = False
    """This attempt has sampled a token."""
    finish_reason: FinishReason | None = None
    ended_s: float = 0.0
    open_tokens: int = 0
    """So many more may come from its former worker, from its last chunk on."""
    steps_alone: int = 0
    """Without one of those, until now."""
    takes_late: bool = False
    """It changed workers, and was to take such tokens."""
    rehearsal: bool = False
    """Nobody reads it, and nobody acknowledges its end: only its blocks are wanted."""
    proof: bytes = b""
    """That this worker was given it, for its gateway."""
    is_proven: bool = False
    """The proof went along with tokens."""
    heir_digest: bytes = b""
    """Of the key of those gateways that may take it over; empty: none may."""
    traceparent: str = ""
    """Of the request's span, for those of what is computed here; empty: nobody traces it."""
    orphaned_s: float | None = None
    """Since when its gateway is known to have started anew: it waits for an heir."""

    @classmethod
    def from_spec(cls, spec: SequenceSpec, max_context_tokens: int, now_s: float) -> "HeldSequence":
        """As a plan starts it."""
        tokens = unpack_tokens(spec.prompt + spec.generated)
        prompt_tokens = spec.prompt_tokens
        return cls(
            ref=spec.ref,
            gateway_id=spec.gateway_id,
            gateway_incarnation=spec.gateway_incarnation,
            sampling=spec.sampling,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            limit_tokens=min(prompt_tokens + spec.sampling.max_tokens, max_context_tokens),
            waited_s=spec.waited_s,
            received_s=now_s,
            deadline_in_s=spec.deadline_in_s,
            cache_salt=spec.cache_salt,
            tenant=spec.tenant.name,
            rehearsal=spec.rehearsal,
            open_tokens=spec.open_tokens,
            takes_late=spec.open_tokens > 0,
            heir_digest=spec.heir_digest,
            traceparent=spec.traceparent,
        )

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def allocated_blocks(self) -> int:
        """Its own, and those that it waits for."""
        return len(self.blocks) + (0 if self.awaited is None else len(self.awaited.nodes))

    @property
    def is_put_off(self) -> bool:
        """It waits for stored blocks, or has yet to compute what plans count on."""
        return self.awaited is not None or self.postponed is not None


    def append(self, sampled: Sampled) -> None:
        """The answer's next token."""
        self.sampled = True
        self.tokens.append(sampled.token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)

    def forget_blocks(self) -> None:
        """Nothing of it is computed any more. What its blocks were called stays true."""
        self.blocks = block_table()
        self.computed_tokens = self.published_blocks = self.promised_tokens = 0
        self.postponed = self.awaited_until_s = None
        if not self.sampled:
            self.cached_tokens = 0

    def may_begin_at(self, first_token: int) -> bool:
        """Whether a chunk may begin there: where the computation stands, or, once a stored prefix was found,
        anywhere up to its end; what is missing then is computed along."""
        if self.state is SequenceState.DECODING:
            return False
        reach = max(self.computed_tokens, self.promised_tokens)
        return first_token == self.computed_tokens or (self.promised_tokens > 0 and first_token <= reach)

    def due_reason(self) -> FinishReason | None:
        """Why the answer is complete as it stands, or None."""
        held_tokens = len(self.tokens)
        if (
            held_tokens > self.prompt_tokens + self.sampling.forced_tokens
            and self.tokens[-1] in self.sampling.end_token_ids
        ):
            return FinishReason.STOP
        if held_tokens >= self.limit_tokens:
            return FinishReason.LENGTH
        return None

    def move_to(self, state: SequenceState) -> None:
        """Raises InternalError on a transition that `TRANSITIONS` does not list."""
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"{self.ref} cannot go from {self.state} to {state}")
        self.state = state
        self.alive = state is not SequenceState.ENDED

    def check_integrity(self) -> None:
        """AssertionError when log-probabilities are kept that nobody wants, or more than tokens."""
        assert len(self.logprobs) <= (0 if self.sampling.top_logprobs is None else self.generated_tokens)

    def take_proof(self) -> bytes:
        """Once; empty from then on. A gateway that missed it finds it in a heartbeat."""
        proof = b"" if self.is_proven else self.proof
        self.is_proven = True
        return proof

    def report(self, now_s: float) -> SequenceReport:
        """What heartbeats say of it. Times are seconds on the worker's clock, sent as differences only."""
        held_s = now_s - self.received_s
        return SequenceReport(
            ref=self.ref,
            gateway_id="" if self.rehearsal else self.gateway_id,
            state=self.state,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            computed_tokens=self.computed_tokens,
            max_tokens=self.sampling.max_tokens,
            allocated_blocks=self.allocated_blocks,
            finish_reason=self.finish_reason,
            waited_s=as_seconds(self.waited_s + held_s),
            deadline_in_s=None if self.deadline_in_s is None else as_seconds(self.deadline_in_s - held_s),
            proof=self.proof,
            heir_of=self.gateway_incarnation if self.heir_digest else 0,
        )
