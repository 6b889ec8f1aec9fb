"""Heartbeats: what each publisher says of itself. Together they are the stack's recoverable state."""

from enum import StrEnum
from typing import Any

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
    """A worker's KV in its own blocks. Lent blocks are outside `total_blocks`, borrowed ones inside."""

    total_blocks: Count
    free_blocks: Count
    evictable_blocks: Count = 0
    """Unreferenced prefix blocks."""
    lent_blocks: Count = 0
    borrowed_blocks: Count = 0
    growable_blocks: Count = 0
    doomed_blocks: Count = 0
    """About to vanish because the pool shrinks."""
    borrowed_free_blocks: Count = 0
    """Of `free_blocks` and `evictable_blocks`: borrowed, so not to be lent on."""
    most_lent_blocks: Count = 0
    """It never lends more than this for sequences, whatever is free; host memory included."""
    lendable_blocks: Count | None = None
    """What it would lend now, within its cap; None: it says nothing of that."""
    host_blocks: Count = 0
    """Of host memory, kept for others and for nothing else; outside every other figure here."""
    host_lent_blocks: Count = 0
    """Of `host_blocks`."""
    host_lendable_blocks: Count = 0
    """Of `host_blocks`, what it would lend now."""
    host_yielding_blocks: Count = 0
    """Of `host_lent_blocks`, those that other workers' prefix caches have: they give way to sequences."""
    is_host_for_caches: bool = False
    """No sequence of anybody's could use its host memory: it is lent for prefix caches alone."""

    @property
    def plannable_blocks(self) -> int:
        """What a plan may count on being able to allocate now."""
        return max(0, self.free_blocks + self.evictable_blocks - self.doomed_blocks)

    @property
    def loanable_blocks(self) -> int:
        """What it would lend for sequences now, of both tiers."""
        host_blocks = self.host_lendable_blocks + self.host_yielding_blocks
        return (self.lendable_blocks or 0) + (0 if self.is_host_for_caches else host_blocks)


class SequenceState(StrEnum):
    """A sequence as its worker sees it."""

    WAITING = "waiting"
    """Held, nothing computed (new, or preempted for recomputation)."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"
    """Kept until the gateway acknowledges the end."""


class SequenceReport(Message, frozen=True, kw_only=True):
    """One sequence in a heartbeat: enough for a scheduler to adopt it and for a gateway to see gaps."""

    ref: SequenceRef
    gateway_id: OptionalId
    """Empty: nobody waits for it, it is a rehearsal of a move."""
    state: SequenceState
    prompt_tokens: Count
    generated_tokens: Count
    computed_tokens: Count
    """Tokens whose KV is present (chunk progress)."""
    max_tokens: Count
    allocated_blocks: Count
    finish_reason: FinishReason | None = None
    waited_s: Seconds = 0.0
    """Seconds since the gateway accepted the request."""
    deadline_in_s: SignedSeconds | None = None
    proof: Digest = b""
    """`proof_of` the attempt's capability."""
    heir_of: Number = 0
    """The start of its gateway, where another gateway may take it over from that; 0: nobody may."""


class CacheReport(Message, frozen=True, kw_only=True):
    """A worker's prefix cache: what lies below the device, and what was found since the worker started."""

    host_blocks: Count = 0
    """Of the host tier; `host_used_blocks` of them hold something, as for the disk."""
    host_used_blocks: Count = 0
    disk_blocks: Count = 0
    disk_used_blocks: Count = 0
    peer_blocks: Count = 0
    """Of host memory that other workers lend to the cache."""
    peer_used_blocks: Count = 0
    device_hits: Number = 0
    """Blocks of prompts found there first, and used."""
    host_hits: Number = 0
    disk_hits: Number = 0
    peer_hits: Number = 0
    borrowed_hits: Number = 0
    """Of `device_hits`, blocks that lie at creditors."""
    misses: Number = 0
    """Blocks of prompts that were stored nowhere."""


WAIT_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
"""Each counts times up to its bound, and one more count what is longer."""
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""The same of a step's tokens."""


class StepsReport(Message, frozen=True, kw_only=True):
    """What a worker's steps were like since it started, counted in buckets."""

    tokens: Number = 0
    """Of all steps: prompts' and answers'."""
    by_tokens: tuple[Number, ...] = ()
    """Steps by their tokens, `STEP_TOKEN_BOUNDS`."""
    prefill_s: Seconds = 0.0
    """Of sequences that began here: from the plan that brought them to their first token."""
    by_prefill: tuple[Number, ...] = ()
    """These times, by `WAIT_BOUNDS_S`."""
    inference_s: Seconds = 0.0
    """Of sequences that ended here: from the plan that brought them to their last token."""
    by_inference: tuple[Number, ...] = ()


class WorkerReported(Message, frozen=True, kw_only=True):
    """A worker's heartbeat, and its answer to a snapshot command."""

    worker_id: Id
    incarnation: Number
    seq: Number
    """Counts heartbeats and snapshots of this incarnation, from 1."""
    stepped_seq: Number
    """`seq` of the last `WorkerStepped` this report includes."""
    epoch: Epoch
    """Highest scheduler epoch seen."""
    plan_seq: Number
    """Last plan of that epoch that has reached it, though a step may still run that began before."""
    model: Text
    """Name the model is served under."""
    block_tokens: PositiveCount
    max_context_tokens: Count
    """Longest prompt + answer: the model's limit, or the KV capacity when that is smaller."""
    capacity: Capacity
    sequences: tuple[SequenceReport, ...] = ()
    host: Text = ""
    """Locality: workers with equal hosts are neighbours."""
    lent_to_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """Of `capacity.lent_blocks`: what each debtor holds, by worker id."""
    borrowed_from_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """Of `capacity.borrowed_blocks`: what each creditor lends, by worker id."""
    host_lent_to_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """`capacity.host_lent_blocks` by debtor."""
    host_borrowed_from_blocks: dict[Id, Count] = msgspec.field(default_factory=dict)
    """Of `capacity.borrowed_blocks`, those in creditors' host memory; device and host together are all. And
    what its prefix cache has there (`cache.peer_blocks`), which `capacity` does not know."""
    prefill_tokens_per_s: Rate = 0.0
    """Measured, exponentially weighted; 0 before the first measurement."""
    prefill_context_tokens: Count = 0
    """That preceded a prompt token of those measurements in its sequence, weighted alike."""
    decode_step_s: Seconds = 0.0
    """Measured, exponentially weighted; 0 before the first measurement."""
    fingerprint: Digest = b""
    """What must agree for KV to be exchanged (`shared.blocks`); empty: nobody else can use its KV."""
    caches_prefixes: bool = False
    """Blocks outlive their sequences, under names that begin with the fingerprint."""
    weights: Text = ""
    """Digest of the model, its configuration and weights, in hex; empty: not known. Workers of one name must
    have the same."""
    kv_block_bytes: Number = 0
    """Of one block over all layers; 0: its blocks cannot be fetched."""
    link_bytes_per_s: dict[Id, Rate] = msgspec.field(default_factory=dict)
    """Measured when it fetched KV from other workers, by their ids."""
    host_block_s: Seconds = 0.0
    """Measured: one block from host memory to the device; 0: there is no host tier."""
    swap_room_blocks: Count = 0
    """More blocks of preempted sequences that it would keep on the host (`PreemptMode.SWAP`)."""
    shadow_room_blocks: Count = 0
    """More copies of blocks of sequences that run on other workers that it would keep there."""
    remote_block_s: Seconds = 0.0
    """Measured: how much longer a step takes for each block in use that lies at another worker; 0: not
    known."""
    expand_stall_s: Seconds | None = None
    """Measured: what a step waits for each layer of KV that Pie has on the host, and would for one more;
    None where there is no Pie, or no such layer yet."""
    swapped_layers: Count = 0
    """Of the model's, those whose KV Pie keeps on the host."""
    cache: CacheReport | None = None
    """None: there is no prefix cache."""
    busy_share: Share = 0.0
    """Of the last while, in which its engine computed."""
    bulk_addresses: dict[Id, Text] = msgspec.field(default_factory=dict)
    """Where its bulk plane listens, by transport; who dials asks it for a ticket first (`AskTicket`)."""
    steps: StepsReport | None = None
    """None: nothing was computed yet."""
    protocol: Count = 0
    """`shared.release.PROTOCOL` of its code."""

    @property
    def door(self) -> str:
        """Where the system refuses connections as soon as the worker has ended: host:port; "": nowhere."""
        return self.bulk_addresses.get("tcp", "")


class SchedulerAnnounced(Message, frozen=True, kw_only=True):
    """At start, then at a fixed interval. A new incarnation asks gateways to resubmit what runs."""

    scheduler_id: Id
    incarnation: Number
    epoch: Epoch
    policy: Text
    queued: Count = 0
    running: Count = 0
    queued_by_model: dict[Text, Count] = msgspec.field(default_factory=dict)
    preemptions: Count = 0
    """In this term, as what follows."""
    waits: tuple[Count, ...] = ()
    """How long sequences waited for their first plan, counted by `WAIT_BOUNDS_S`."""
    waited_s: Seconds = 0.0
    """All of it together."""
    placed_prompt_tokens: Number = 0
    """Of sequences that are over, in this term; of these: expected in caches, found, and wrongly expected."""
    hits_expected_tokens: Number = 0
    hits_found_tokens: Number = 0
    hits_error_tokens: Number = 0
    protocol: Count = 0
    """`shared.release.PROTOCOL` of its code."""


class WorkerLost(Message, frozen=True, kw_only=True):
    """Scheduler → gateways: this worker is silent or was restarted; resubmit these, with a higher attempt."""

    worker_id: Id
    incarnation: Number
    refs: tuple[SequenceRef, ...]


class SequencesGivenUp(Message, frozen=True, kw_only=True):
    """Scheduler → gateways: these attempts will not be answered; submit them again to learn why."""

    refs: tuple[SequenceRef, ...]


class StackVerdict(Message, frozen=True, kw_only=True):
    """Supervisor → gateways, repeated: what is wrong with the stack; nothing where it is well."""

    troubles: tuple[Text, ...] = ()


class GatewayReported(Message, frozen=True, kw_only=True):
    """A gateway's heartbeat. Nobody reads sequences of a silent gateway or of an earlier incarnation."""

    gateway_id: Id
    incarnation: Number
    active: Count = 0
    protocol: Count = 0
    """`shared.release.PROTOCOL` of its code."""


class SequenceFinished(Message, frozen=True, kw_only=True):
    """Gateway → whoever learns: a complete answer, once."""

    ref: SequenceRef
    prompt: bytes
    output_tokens: Count
    finish_reason: FinishReason
    max_tokens: Count
    model: Text = ""
    """Whose answer it is; empty: that of the one model that there is."""

    def __post_init__(self) -> None:
        check_packed(self.prompt)


class ServiceStatus(Message, frozen=True, kw_only=True):
    """Answer of every instance to `cmd.<service>.status`."""

    service: Id
    instance: Id
    incarnation: Number
    uptime_s: Seconds
    version: Text = ""
    """Of its code; empty: older than this field."""
    protocol: Count = 0
    """`shared.release.PROTOCOL` of its code."""
    tasks: Count = 0
    """That its event loop has."""
    details: dict[Text, Any] = msgspec.field(default_factory=dict)
    """Scalars, and tables as lists of dictionaries, for people to read."""
