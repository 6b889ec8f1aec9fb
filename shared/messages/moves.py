"""Migrations: who asks for them, who prepares them, how each ended; and how many workers should run.

See docs/migration.md.
"""

from enum import StrEnum

import msgspec

from shared.messages.base import Message
from shared.messages.sequence import SequenceRef, check_packed
from shared.messages.values import Count, Digest, Id, Number, Seconds, Text


class MoveMode(StrEnum):
    """What travels so that the target need not begin from nothing."""

    TOKENS = "tokens"
    """Token ids; the target computes their KV again while the source goes on."""
    KV = "kv"
    """Whole blocks of KV, over the bulk plane, while the source goes on."""


class SequenceMove(Message, frozen=True, kw_only=True):
    """One sequence is to go on on another worker."""

    ref: SequenceRef
    target: Id
    mode: MoveMode = MoveMode.TOKENS


class MoveSequences(Message, frozen=True, kw_only=True):
    """Placement, or an operator → scheduler."""

    moves: tuple[SequenceMove, ...]


class MovesTaken(Message, frozen=True, kw_only=True):
    """The answer: for each move why it was not begun; empty: it was."""

    refusals: tuple[Text, ...]


class MovePrepared(Message, frozen=True, kw_only=True):
    """Scheduler → gateways: the target has the sequence's KV; the owner may raise the attempt now."""

    ref: SequenceRef
    target: Id
    open_tokens: Count = 0
    """The owner may go on reading the old worker until the target has caught up, and send the target so many
    more tokens after the submission."""


class SequenceMoved(Message, frozen=True, kw_only=True):
    """Scheduler → whoever asked: a move is over. It failed when it has a `reason`; nothing was lost then."""

    ref: SequenceRef
    """The attempt that was to move."""
    source: Id
    target: Id
    mode: MoveMode = MoveMode.TOKENS
    reason: Text = ""
    rounds: Count = 0
    """Rehearsals at the target, or times that blocks were fetched."""
    rehearsed_tokens: Count = 0
    """Prompt and answer so far, at the last one."""
    moved_bytes: Number = 0
    """Of KV that was fetched."""
    late_bytes: Number = 0
    """Of these, what was fetched once the answer had begun."""
    late_s: Seconds = 0.0
    """That this took on the link."""
    fallback: Text = ""
    """Why KV was not fetched, or not all of it: the rest was computed from tokens."""
    prepare_s: Seconds = 0.0
    """From the order to the gateway being told."""
    switch_s: Seconds = 0.0
    """From then until the target ran the sequence."""


class PullBlocks(Message, frozen=True, kw_only=True):
    """Scheduler → target of a migration: fetch from its source the blocks of these tokens that are missing
    here, and keep them in the prefix cache. Again is harmless."""

    source: Id
    source_incarnation: Number
    tokens: bytes
    """Packed: prompt and answer so far, those at the source whose KV is computed."""
    cache_salt: Digest = b""
    valid_for_s: Seconds = 10.0
    """What is not there by then is not fetched any more."""
    is_shadow: bool = False
    """The sequence stays where it is: these are for the case that its worker dies. They are kept on the host
    as far as there is room for such, and fetched when nothing else is."""

    def __post_init__(self) -> None:
        check_packed(self.tokens)


class BlocksPulled(Message, frozen=True, kw_only=True):
    """The answer: how much of it is there now, whether it was fetched or known before."""

    held_tokens: Count
    """From the beginning, in whole blocks."""
    fetched_blocks: Count = 0
    fetched_bytes: Number = 0
    took_s: Seconds = 0.0
    """On the link."""
    is_cut_short: bool = False
    """Its time was over before all was there: what is missing may come with the next order."""


class WorkersWanted(Message, frozen=True, kw_only=True):
    """Placement → whoever runs workers, repeated: what should be, not what to do."""

    wanted: Count
    """How many workers of `model` should run."""
    parked: tuple[Id, ...] = ()
    """Workers that get nothing any more; they may be stopped."""
    model: Text = ""
    """Of which this says something, and of no other; empty: of the one model that there is."""


class WorkerRoles(Message, frozen=True, kw_only=True):
    """Placement → scheduler, repeated: what each worker of `model` is given to do."""

    model: Text = ""
    roles: dict[Id, Text] = msgspec.field(default_factory=dict)
    """By worker: `prefill`, `decode` or `both`."""
    shortage: Text = ""
    """Why nothing new can be served: nobody may compute prompts, or write answers; empty: it can."""
