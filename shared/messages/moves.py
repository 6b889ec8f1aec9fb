"""Migration commands, progress and results; and the number and roles of workers that should run. See
docs/migration.md."""

from enum import StrEnum

import msgspec

from shared.messages.base import Message
from shared.messages.sequence import SequenceRef, check_packed
from shared.messages.values import Count, Digest, Id, Number, Seconds, Text


class MoveMode(StrEnum):
    """Data that is sent so that the target does not start from nothing."""

    TOKENS = "tokens"
    """Token ids; the target recomputes their KV while the source continues."""
    KV = "kv"
    """Whole KV blocks, over the bulk plane, while the source continues."""


class SequenceMove(Message, frozen=True, kw_only=True):
    """One sequence and the worker that it should migrate to."""

    ref: SequenceRef
    target: Id
    mode: MoveMode = MoveMode.TOKENS
    why: Text = ""


class MoveSequences(Message, frozen=True, kw_only=True):
    """Placement or an operator → scheduler: migrate these sequences."""

    moves: tuple[SequenceMove, ...]


class MovesTaken(Message, frozen=True, kw_only=True):
    """Reply: one entry per move; empty if it was started, else the reason why not."""

    refusals: tuple[Text, ...]


class MovePrepared(Message, frozen=True, kw_only=True):
    """Scheduler → gateways: the target has the sequence's KV; the gateway may now raise the attempt."""

    ref: SequenceRef
    target: Id
    open_tokens: Count = 0
    """Tokens that the gateway may still read from the old worker, and send to the target after submitting."""


class SequenceMoved(Message, frozen=True, kw_only=True):
    """Scheduler → requester: a migration ended. If `reason` is set, it failed and the sequence stayed put."""

    ref: SequenceRef
    """Attempt that was to migrate."""
    source: Id
    target: Id
    mode: MoveMode = MoveMode.TOKENS
    why: Text = ""
    """Why it was to migrate."""
    reason: Text = ""
    rounds: Count = 0
    """Number of rehearsals at the target, or of block fetches."""
    rehearsed_tokens: Count = 0
    """Prompt and answer tokens covered by the last rehearsal."""
    moved_bytes: Number = 0
    """Bytes of KV fetched."""
    late_bytes: Number = 0
    """Part of `moved_bytes` that was fetched after the answer had begun."""
    late_s: Seconds = 0.0
    """Seconds that `late_bytes` took on the link."""
    fallback: Text = ""
    """Reason why some or all KV was recomputed from tokens instead of fetched."""
    prepare_s: Seconds = 0.0
    """Seconds from the command to the gateway's notification."""
    switch_s: Seconds = 0.0
    """Seconds from the notification until the target ran the sequence."""


class PullBlocks(Message, frozen=True, kw_only=True):
    """Scheduler → migration target: fetch missing KV blocks from the source into the prefix cache.
    Idempotent."""

    source: Id
    source_incarnation: Number
    tokens: bytes
    """Packed tokens of prompt and answer whose KV the source has computed."""
    cache_salt: Digest = b""
    valid_for_s: Seconds = 10.0
    """Time limit; blocks that have not arrived by then are not fetched."""
    is_shadow: bool = False
    """True for a backup copy in case the source dies. It is kept in spare host memory and has lowest
    priority."""

    def __post_init__(self) -> None:
        check_packed(self.tokens)


class BlocksPulled(Message, frozen=True, kw_only=True):
    """Reply: how much of the sequence the target holds, fetched now or known before."""

    held_tokens: Count
    """Tokens held from the beginning, in whole blocks."""
    fetched_blocks: Count = 0
    fetched_bytes: Number = 0
    took_s: Seconds = 0.0
    """Seconds spent on the link."""
    is_cut_short: bool = False
    """True if the time limit ended the fetch early; a repeated command continues it."""


class WorkersWanted(Message, frozen=True, kw_only=True):
    """Placement → autoscaler, repeated: the desired state of the fleet."""

    wanted: Count
    """Number of workers of `model` that should run."""
    parked: tuple[Id, ...] = ()
    """Workers that receive no new work and may be stopped."""
    model: Text = ""
    """The only model that this message is about; empty: the stack serves only one."""


class WorkerRoles(Message, frozen=True, kw_only=True):
    """Placement → scheduler, repeated: the role of each worker of `model`."""

    model: Text = ""
    roles: dict[Id, Text] = msgspec.field(default_factory=dict)
    """Role by worker id: `prefill`, `decode` or `both`."""
    shard: Count = 0
    """Shard of these workers."""
    shortage: Text = ""
    """Reason why no new request can be served (no worker for prefill or for decode); empty: none."""
