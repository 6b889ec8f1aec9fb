"""Heartbeats and status reports of all services. Together they are enough to rebuild the stack's state."""

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from shared.messages.base import Message
from shared.messages.sequence import FinishReason, SequenceRef, check_packed
from shared.messages.values import (
    Count,
    Digest,
    Epoch,
    Id,
    Number,
    OptionalId,
    PositiveCount,
    Rate,
    Seconds,
    Share,
    SignedSeconds,
    Text,
)


class Capacity(Message, frozen=True, kw_only=True):
    """KV capacity in the worker's own blocks. `total_blocks` includes borrowed blocks, not lent ones."""

    total_blocks: Count
    free_blocks: Count
    evictable_blocks: Count = 0
    """Blocks of cached prefixes that no sequence uses."""
    lent_blocks: Count = 0
    borrowed_blocks: Count = 0
    growable_blocks: Count = 0
    doomed_blocks: Count = 0
    """Blocks about to disappear because the pool shrinks."""
    borrowed_free_blocks: Count = 0
    """Borrowed part of `free_blocks` and `evictable_blocks`; cannot be lent on."""
    most_lent_blocks: Count = 0
    """Lending limit for sequences, host memory included."""
    lendable_blocks: Count | None = None
    """Blocks that it would lend now, within the limit; None: unknown."""
    host_blocks: Count = 0
    """Host memory reserved for lending, in blocks; not counted in any other field."""
    host_lent_blocks: Count = 0
    """Lent part of `host_blocks`."""
    host_lendable_blocks: Count = 0
    """Part of `host_blocks` that it would lend now."""
    host_yielding_blocks: Count = 0
    """Part of `host_lent_blocks` that other workers' prefix caches use; it yields to sequences."""
    is_host_for_caches: bool = False
    """True if its host memory can serve only prefix caches, because no sequence could use it."""

    @property
    def plannable_blocks(self) -> int:
        """Number of blocks that a plan may allocate now."""
        return max(0, min(self.free_blocks + self.evictable_blocks - self.doomed_blocks, self.total_blocks))

    @property
    def own_lendable_blocks(self) -> int:
        """Number of own blocks on the device that it could lend now."""
        own = self.plannable_blocks - self.borrowed_free_blocks
        return max(0, own if self.lendable_blocks is None else min(own, self.lendable_blocks))

    @property
    def loanable_blocks(self) -> int:
        """Number of blocks that it would lend for sequences now, on device and host."""
        host_blocks = self.host_lendable_blocks + self.host_yielding_blocks
        return (self.lendable_blocks or 0) + (0 if self.is_host_for_caches else host_blocks)


class SequenceState(StrEnum):
    """State of a sequence at its worker."""

    WAITING = "waiting"
    """Held, nothing computed yet: new, or preempted for recomputation."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"
    """Kept until the gateway acknowledges the end."""


class SequenceReport(Message, frozen=True, kw_only=True):
    """One sequence in a heartbeat. Lets a scheduler adopt it, and a gateway detect missing tokens."""

    ref: SequenceRef
    gateway_id: OptionalId
    """Empty: rehearsal of a migration, with no reader."""
    state: SequenceState
    prompt_tokens: Count
    generated_tokens: Count
    computed_tokens: Count
    """Tokens whose KV is present."""
    max_tokens: Count
    allocated_blocks: Count
    finish_reason: FinishReason | None = None
    waited_s: Seconds = 0.0
    """Seconds since the gateway accepted the request."""
    deadline_in_s: SignedSeconds | None = None
    proof: Digest = b""
    """`proof_of` the attempt's capability."""
    heir_of: Number = 0
    """Incarnation of the gateway that another gateway may take it over from; 0: no takeover allowed."""


class CacheReport(Message, frozen=True, kw_only=True):
    """Prefix cache of a worker: tiers below the device, and hits since the worker started."""

    host_blocks: Count = 0
    """Size of the host tier; `host_used_blocks` of it are in use. The disk fields are alike."""
    host_used_blocks: Count = 0
    disk_blocks: Count = 0
    disk_used_blocks: Count = 0
    peer_blocks: Count = 0
    """Host memory that other workers lend to the cache."""
    peer_used_blocks: Count = 0
    device_hits: Number = 0
    """Prompt blocks used whose fastest tier was the device; likewise for the other tiers."""
    host_hits: Number = 0
    disk_hits: Number = 0
    peer_hits: Number = 0
    borrowed_hits: Number = 0
    """Part of `device_hits` that lies at creditors."""
    misses: Number = 0
    """Prompt blocks that no tier stored."""
    host_written: Number = 0
    """Blocks copied to the host; likewise for the other tiers."""
    disk_written: Number = 0
    peer_written: Number = 0


WAIT_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
"""Upper bounds of histogram buckets in seconds; one more bucket counts longer times."""
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Upper bounds of histogram buckets for tokens per step."""


class StepsReport(Message, frozen=True, kw_only=True):
    """Histograms of a worker's steps since it started."""

    tokens: Number = 0
    """Prompt and answer tokens of all steps."""
    by_tokens: tuple[Number, ...] = ()
    """Number of steps by tokens, in the buckets of `STEP_TOKEN_BOUNDS`."""
    prefill_s: Seconds = 0.0
    """Total seconds from the first plan of a sequence to its first token, for sequences started here."""
    by_prefill: tuple[Number, ...] = ()
    """The same times in the buckets of `WAIT_BOUNDS_S`."""
    inference_s: Seconds = 0.0
    """Total seconds from the first plan of a sequence to its last token, for sequences ended here."""
    by_inference: tuple[Number, ...] = ()


class WorkerReported(Message, frozen=True, kw_only=True):
    """Heartbeat of a worker; also the reply to `TakeSnapshot`."""

    worker_id: Id
    incarnation: Number
    seq: Number
    """Number of the heartbeat or snapshot within this incarnation, from 1."""
    stepped_seq: Number
    """`seq` of the last `WorkerStepped` included here."""
    epoch: Epoch
    """Highest scheduler epoch seen."""
    plan_seq: Number
    """Last plan of that epoch received; a step of an earlier plan may still be running."""
    model: Text
    """Name under which the model is served."""
    block_tokens: PositiveCount
    max_context_tokens: Count
    """Maximum prompt + answer: the model's limit, or the KV capacity if smaller."""
    batch_sequences: Count = 0
    """Sequences that its device carries at once; 0: as many as the scheduler's default."""
    step_tokens: Count = 0
    """Tokens that its device carries in a step; 0 likewise."""
    capacity: Capacity
    sequences: tuple[SequenceReport, ...] = ()
    host: Text = ""
    """Host name; workers with the same host are neighbours."""
    lent_to_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """`capacity.lent_blocks` by debtor's worker id."""
    borrowed_from_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """`capacity.borrowed_blocks` by creditor's worker id."""
    host_lent_to_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """`capacity.host_lent_blocks` by debtor's worker id."""
    host_borrowed_from_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """Blocks in creditors' host memory, by worker id: the host part of `capacity.borrowed_blocks`, plus the
    prefix cache's `cache.peer_blocks`."""
    prefill_tokens_per_s: Rate = 0.0
    """Exponentially weighted mean; 0: not measured yet."""
    prefill_context_tokens: Count = 0
    """Mean context length before the measured prompt tokens, weighted likewise."""
    decode_step_s: Seconds = 0.0
    """Exponentially weighted mean; 0: not measured yet."""
    fingerprint: Digest = b""
    """Fingerprint that must match to exchange KV (`shared.blocks`); empty: KV cannot be shared."""
    caches_prefixes: bool = False
    """True if blocks outlive their sequences, under hashes that begin with the fingerprint."""
    weights: Text = ""
    """Digest of model, configuration, weights and adapters in hex; empty: unknown. Workers of one model must
    agree."""
    adapters: tuple[Text, ...] = ()
    """Names of its LoRA adapters."""
    kv_block_bytes: Number = 0
    """Bytes of one block over all layers; 0: blocks cannot be fetched."""
    link_bytes_per_s: dict[Id, Rate] = msgspec.field(default_factory=dict)
    """Measured throughput of KV fetches, by worker id of the source."""
    host_block_s: Seconds = 0.0
    """Measured seconds to copy one block from host to device; 0: no host tier."""
    swap_room_blocks: Count = 0
    """Number of additional swapped-out blocks that fit the host (`PreemptMode.SWAP`)."""
    shadow_room_blocks: Count = 0
    """Number of additional backup blocks of other workers' sequences that fit the host."""
    remote_block_s: Seconds = 0.0
    """Measured extra step time in seconds per remote block in use; 0: unknown."""
    expand_stall_s: Seconds | None = None
    """Measured stall per step in seconds for each KV layer that Pie keeps on the host. None: no Pie, or no
    such layer yet."""
    swapped_layers: Count = 0
    """Number of the model's layers whose KV Pie keeps on the host."""
    cache: CacheReport | None = None
    """None: no prefix cache."""
    busy_share: Share = 0.0
    """Recent share of time in which the engine computed."""
    bulk_addresses: dict[Id, Text] = msgspec.field(default_factory=dict)
    """Bulk-plane addresses by transport; dialling needs a ticket (`AskTicket`)."""
    steps: StepsReport | None = None
    """None: nothing computed yet."""
    protocol: Count = 0
    """`shared.release.PROTOCOL` of the running code."""

    @property
    def door(self) -> str:
        """Host and port that refuse connections once the worker process has ended; "" if unknown."""
        return self.bulk_addresses.get("tcp", "")


class ShardLoad(Message, frozen=True, kw_only=True):
    """Load of one model's workers in a shard."""

    workers: Count = 0
    """Number of workers that can take work now."""
    queued: Count = 0
    running: Count = 0
    room_tokens: Count = 0
    """KV that its sequences will not need; 0 while some wait for a worker."""
    context_tokens: Count = 0
    """Longest sequence that a worker can hold."""
    gathers_s: Seconds = 0.0
    """How long the first of its sequences has waited for other workers' memory; 0: none does."""

    @property
    def per_worker(self) -> float:
        """Return the sequences for each worker; infinite without workers."""
        return (self.queued + self.running) / self.workers if self.workers else float("inf")


class SchedulerPresent(Message, frozen=True, kw_only=True):
    """Heartbeat of a scheduler to the others, where the fleet has shards."""

    scheduler_id: Id
    incarnation: Number
    shards: PositiveCount
    """Number of shards as configured."""
    held: tuple[Count, ...] = ()
    """Shards that it leads."""


class SchedulerAnnounced(Message, frozen=True, kw_only=True):
    """Sent at start, then periodically. A new incarnation asks gateways to resubmit running requests."""

    scheduler_id: Id
    incarnation: Number
    epoch: Epoch
    policy: Text
    queued: Count = 0
    running: Count = 0
    queued_by_model: dict[Text, Count] = msgspec.field(default_factory=dict)
    preemptions: Count = 0
    """Number in this term; likewise the fields below."""
    waits: tuple[Count, ...] = ()
    """Waits for the first plan, in the buckets of `WAIT_BOUNDS_S`."""
    waited_s: Seconds = 0.0
    """Total seconds of these waits."""
    placed_prompt_tokens: Number = 0
    """Prompt tokens of ended sequences. The next three: expected cache hits, actual hits, and the error."""
    hits_expected_tokens: Number = 0
    hits_found_tokens: Number = 0
    hits_error_tokens: Number = 0
    protocol: Count = 0
    """`shared.release.PROTOCOL` of the running code."""
    shard: Count = 0
    """Shard of this term; all counts are of its workers only."""
    shards: PositiveCount = 1
    loads: dict[Text, ShardLoad] = msgspec.field(default_factory=dict)
    """By model; empty with one shard."""


class WorkerLost(Message, frozen=True, kw_only=True):
    """Scheduler → gateways: a worker left, is silent or restarted; resubmit these with a higher attempt."""

    worker_id: Id
    incarnation: Number
    refs: tuple[SequenceRef, ...]
    is_dead: bool = True
    """False where only its silence says so, or its process is there and is refused."""


class SequencesGivenUp(Message, frozen=True, kw_only=True):
    """Scheduler → gateways: these attempts were dropped; submit them again to learn why."""

    refs: tuple[SequenceRef, ...]


class SequenceHandedOver(Message, frozen=True, kw_only=True):
    """Scheduler → gateway: this attempt was dropped; submit the next one to `shard`."""

    ref: SequenceRef
    shard: Count
    from_shard: Count = 0
    epoch: Epoch = 0
    """Of the term that dropped it; a later one of `from_shard` may have it. 0: not told."""


class StackVerdict(Message, frozen=True, kw_only=True):
    """Supervisor → gateways, repeated: faults of the stack; empty: healthy."""

    troubles: tuple[Text, ...] = ()
    short_of: tuple[Text, ...] = ()
    """What delays requests."""


MOST_REFUSED = 64


class GatewayReported(Message, frozen=True, kw_only=True):
    """Heartbeat of a gateway. If it stops or its incarnation changes, its sequences have no reader."""

    gateway_id: Id
    incarnation: Number
    active: Count = 0
    protocol: Count = 0
    """`shared.release.PROTOCOL` of the running code."""
    refused: Annotated[tuple[Digest, ...], msgspec.Meta(max_length=MOST_REFUSED)] = ()
    """Fingerprints of requests that it refuses, because they killed workers."""


class SequenceFinished(Message, frozen=True, kw_only=True):
    """Gateway → predictor: an answer is over, sent once; without its prompt if it was cut short."""

    ref: SequenceRef
    prompt: bytes
    output_tokens: Count
    finish_reason: FinishReason
    max_tokens: Count
    model: Text = ""
    """Model that wrote the answer; empty: the stack serves only one."""

    def __post_init__(self) -> None:
        check_packed(self.prompt)


class ServiceStatus(Message, frozen=True, kw_only=True):
    """Reply of every instance to `cmd.<service>.status`."""

    service: Id
    instance: Id
    incarnation: Number
    uptime_s: Seconds
    version: Text = ""
    """Version of the running code; empty: older than this field."""
    protocol: Count = 0
    """`shared.release.PROTOCOL` of the running code."""
    tasks: Count = 0
    """Number of tasks on its event loop."""
    details: dict[Text, Any] = msgspec.field(default_factory=dict)
    """Scalars, and tables as lists of dictionaries, for display."""
