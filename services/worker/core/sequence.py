"""The state of one sequence held by a worker: its tokens, progress, blocks and owner. Pure.

`TRANSITIONS` lists the legal transitions; any other is a bug and raises. A sequence belongs to the gateway
that submitted it, to schedulers, and to heirs, which show a key that only the gateway can have shared.
nats-server checks senders (`shared.subjects`)."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hmac import compare_digest

from services.worker.core.sampling import Sampled
from services.worker.kv.core.block_pool import BlockTable, block_table
from services.worker.kv.core.radix_tree import Node
from services.worker.kv.core.tier_copier import Awaited
from shared.blocks import BlockHash
from shared.errors import ForeignSequence, InternalError
from shared.messages.plans import PrefillChunk
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import (
    FinishReason,
    Sampling,
    SequenceRef,
    SequenceSpec,
    heir_digest_of,
    unpack_tokens,
)
from shared.messages.tokens import TokenLogprobs
from shared.messages.values import as_seconds
from shared.subjects import service_of

TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILLING, SequenceState.ENDED}),
    SequenceState.PREFILLING: frozenset({SequenceState.DECODING, SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.DECODING: frozenset({SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}
"""From → to. A preemption leads back to WAITING."""


def is_scheduler(sender: str) -> bool:
    try:
        return service_of(sender) == "scheduler"
    except ValueError:
        return False


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
    """Maximum of prompt and answer: the answer's limit, or the worker's context."""
    waited_s: float
    """Seconds from its acceptance by the gateway to `received_s`."""
    received_s: float
    deadline_in_s: float | None
    state: SequenceState = SequenceState.WAITING
    alive: bool = True
    """`state` is not ENDED."""
    is_plain: bool = False
    """It decodes, and may do so in a group (`decodes.is_plain`)."""
    computed_tokens: int = 0
    """Number of tokens whose KV is present."""
    begun_tokens: int = 0
    """`computed_tokens` once all steps in flight are over; not more than that: it is in none."""
    blocks: BlockTable = field(default_factory=block_table)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the tokens sampled in this attempt, if requested."""
    cache_salt: bytes = b""
    adapter: str = ""
    tenant: str = ""
    """The tenant that is charged for the blocks it leaves in the cache."""
    names: list[BlockHash] = field(default_factory=list)
    """Names of its full blocks, as far as they were needed."""
    published_blocks: int = 0
    """Number of its blocks that were published to the prefix cache, or came from there."""
    kept: list[Node] = field(default_factory=list)
    """Its first blocks that the host keeps while it is preempted."""
    audited: list[int] = field(default_factory=list)
    """Stored blocks to compare its own computation with: the next ones to become full."""
    awaited: Awaited | None = None
    """Stored blocks that follow those in `blocks`, on their way to the device."""
    awaited_until_s: float | None = None
    """When it stops waiting for them. None: not set yet."""
    computes_rest: bool = False
    """A load fell short, so it loads nothing more."""
    postponed: PrefillChunk | None = None
    """Work that plans count as computed but that had to wait for stored blocks."""
    promised_tokens: int = 0
    """A chunk may begin up to here, since the scheduler was told that everything before it is stored. If some
    of it is gone by then, the chunk computes that, too."""
    cached_tokens: int = 0
    """Number of prompt tokens that came from the cache before this attempt's first token."""
    sampled: bool = False
    """This attempt has sampled a token."""
    finish_reason: FinishReason | None = None
    ended_s: float = 0.0
    open_tokens: int = 0
    """Number of late tokens that may still come from its former worker."""
    steps_alone: int = 0
    """Number of consecutive steps without a late token."""
    takes_late: bool = False
    """It changed workers, and may take late tokens."""
    rehearsal: bool = False
    """It runs only to fill the cache: nobody reads it or acknowledges its end."""
    proof: bytes = b""
    """Shows the gateway that this worker was given the sequence."""
    is_proven: bool = False
    """The proof was sent with tokens."""
    heir_digest: bytes = b""
    """Digest of the key of gateways that may take it over; empty: none may."""
    traceparent: str = ""
    """Trace context of the request; empty: it is not traced."""
    orphaned_s: float | None = None
    """When its gateway was found to have restarted; it then waits for an heir."""

    @classmethod
    def from_spec(cls, spec: SequenceSpec, max_context_tokens: int, now_s: float) -> "HeldSequence":
        """Return the sequence that a plan starts."""
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
            adapter=spec.adapter,
            tenant=spec.tenant.name,
            rehearsal=spec.rehearsal,
            open_tokens=spec.open_tokens,
            takes_late=spec.open_tokens > 0,
            heir_digest=spec.heir_digest,
            traceparent=spec.traceparent,
        )

    def may_be_used_by(self, sender: str, heir_key: bytes = b"") -> bool:
        """Whether the sender may read, end, extend and forget it."""
        if sender == self.gateway_id or is_scheduler(sender):
            return True
        return bool(self.heir_digest) and compare_digest(heir_digest_of(heir_key), self.heir_digest)

    def check_use(self, ref: SequenceRef, sender: str, heir_key: bytes = b"") -> None:
        """Raise ForeignSequence unless `sender` may use it; `ref`: the attempt asked for."""
        if not self.may_be_used_by(sender, heir_key):
            raise ForeignSequence(
                f"{ref} was not submitted by {sender!r}: only the gateway that submitted it may ask for it, "
                "end it or add to it; submit it there under a name of its own"
            )

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def allocated_blocks(self) -> int:
        """Number of its blocks, and of those that it waits for."""
        return len(self.blocks) + (0 if self.awaited is None else len(self.awaited.nodes))

    @property
    def is_put_off(self) -> bool:
        """Whether it waits for stored blocks, or is behind what plans count as computed."""
        return self.awaited is not None or self.postponed is not None

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight computes some of its tokens."""
        return self.begun_tokens > self.computed_tokens

    @property
    def next_position(self) -> int:
        """First position that no step has begun to compute."""
        return max(self.begun_tokens, self.computed_tokens)

    def append(self, sampled: Sampled) -> None:
        """Append the answer's next token."""
        self.sampled = True
        self.tokens.append(sampled.token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)

    def forget_blocks(self) -> None:
        """Drop its blocks and its progress; block names stay valid."""
        self.blocks = block_table()
        self.is_plain = False
        self.computed_tokens = self.begun_tokens = self.published_blocks = self.promised_tokens = 0
        self.postponed = self.awaited_until_s = None
        if not self.sampled:
            self.cached_tokens = 0

    def may_begin_at(self, first_token: int) -> bool:
        """Whether a chunk may begin there: at the computed length or, once a stored prefix was found,
        anywhere up to its end."""
        if self.state is SequenceState.DECODING:
            return False
        reach = max(self.computed_tokens, self.promised_tokens)
        return first_token == self.computed_tokens or (self.promised_tokens > 0 and first_token <= reach)

    def is_within(self, max_context_tokens: int, vocabulary: int, adapters: Iterable[str]) -> bool:
        """Return whether a worker with these limits can compute it."""
        highest = max(max(self.tokens, default=-1), self.sampling.highest_token)
        is_known = highest < vocabulary and self.adapter in ("", *adapters)
        return is_known and 0 < self.prompt_tokens < max_context_tokens

    def due_reason(self) -> FinishReason | None:
        """Return why the answer is complete; None while it is not."""
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
        """Change the state. Raises InternalError on a transition that `TRANSITIONS` does not list."""
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"{self.ref} cannot go from {self.state} to {state}")
        self.state = state
        self.alive = state is not SequenceState.ENDED

    def check_integrity(self) -> None:
        """Raise AssertionError if more log-probabilities are kept than requested."""
        assert len(self.logprobs) <= (0 if self.sampling.top_logprobs is None else self.generated_tokens)

    def take_proof(self) -> bytes:
        """Return the proof once, then nothing. A gateway that missed it reads it from a heartbeat."""
        proof = b"" if self.is_proven else self.proof
        self.is_proven = True
        return proof

    def report(self, now_s: float) -> SequenceReport:
        """Return its part of the heartbeat. Times are durations in seconds."""
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
