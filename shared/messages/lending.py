"""What workers say to each other about lent KV, and the ledger to workers about debts that cancel out.

A *grant* is a set of blocks that a creditor holds for one debtor under a lease. Its generation rises whenever
the set changes; whoever reads, writes or queries lent blocks names both, and is refused where a block has
left the grant since. Blocks are the creditor's own, of its `block_tokens`. No KV travels here: that is the
bulk plane's. Source: papers/001 §4.3–4.5; `algorithms.md` §4.
"""

from enum import StrEnum

from shared.messages.base import Message
from shared.messages.values import Count, Digest, Id, Number, OptionalId, Seconds, Text


class AskTicket(Message, frozen=True, kw_only=True):
    """Who wants to dial."""

    worker_id: Id
    incarnation: Number


class BulkTicket(Message, frozen=True, kw_only=True):
    """Where to dial, and with what."""

    incarnation: Number
    """Of the worker that answers."""
    addresses: dict[Id, Text]
    """By transport."""
    host: Text = ""
    """Workers of equal host may use what works on one host only."""
    ticket: bytes


MOST_GRANT_BLOCKS = 65_536
"""Block ids in one grant: 0.3 MB."""


class KvTier(StrEnum):
    """Where at the creditor lent blocks are."""

    DEVICE = "device"
    HOST = "host"


class Refusal(StrEnum):
    """Why a creditor lends nothing now."""

    NOTHING_FREE = "nothing_free"
    """Its own memory is in use, or the rest is kept for itself."""
    AT_CAP = "at_cap"
    """It has lent as much as it may."""
    NOT_LENDING = "not_lending"
    """Switched off, or frozen by a settlement."""
    OTHER_KV = "other_kv"
    """Its blocks do not fit the debtor's: another model, layout or dtype."""


class BorrowBlocks(Message, frozen=True, kw_only=True):
    """Debtor → creditor. Asking again with the same `request` gets the same grant, not a second one."""

    debtor_id: Id
    debtor_incarnation: Number
    request: Number
    """Counts what this incarnation of the debtor asked of anybody, from 1."""
    blocks: Count
    least_blocks: Count = 1
    """A grant of fewer is of no use."""
    tier: KvTier = KvTier.DEVICE
    fingerprint: Digest = b""
    """What must agree for KV to be exchanged (`shared.blocks`); refused where it is empty."""
    for_cache: bool = False
    """Nothing but cached KV is to be there: the creditor may end the grant at any time."""


class Grant(Message, frozen=True, kw_only=True):
    """Blocks lent to one debtor."""

    creditor_id: Id
    creditor_incarnation: Number
    grant_id: Number
    """Unique within that incarnation of the creditor."""
    generation: Number
    tier: KvTier = KvTier.DEVICE
    blocks: tuple[Count, ...]
    """Physical numbers at the creditor."""
    lease_s: Seconds
    """From the debtor's sending of what this answers; the creditor waits a while longer."""
    attends: bool = True
    """The creditor computes attention over them; else they are only written and fetched."""


class BorrowReply(Message, frozen=True, kw_only=True):
    """Creditor → debtor: a grant of all, of a part, or none and why."""

    grant: Grant | None = None
    refusal: Refusal | None = None


class HeldGrant(Message, frozen=True, kw_only=True):
    """One grant as its debtor knows it."""

    grant_id: Number
    generation: Number


class RenewLeases(Message, frozen=True, kw_only=True):
    """Debtor → creditor, several times within a lease: these are still in use. Others run on to their end."""

    debtor_id: Id
    debtor_incarnation: Number
    creditor_incarnation: Number
    held: tuple[HeldGrant, ...]


class LeasesRenewed(Message, frozen=True, kw_only=True):
    """Creditor → debtor."""

    creditor_incarnation: Number
    lease_s: Seconds
    held: tuple[HeldGrant, ...] = ()
    """Renewed, with their generation now. One that was asked for and is missing has ended: its KV is lost."""
    wanted_back_blocks: Count = 0
    """The creditor is short by so many blocks of what it has lent to this debtor."""


class ReturnBlocks(Message, frozen=True, kw_only=True):
    """Debtor → creditor: these blocks of a grant are not needed any more. Again is harmless."""

    debtor_id: Id
    debtor_incarnation: Number
    creditor_incarnation: Number
    grant_id: Number
    blocks: tuple[Count, ...]


class BlocksReturned(Message, frozen=True, kw_only=True):
    """Creditor → debtor: they are free again; what is left of the grant has this generation."""

    generation: Number


class SettlePhase(StrEnum):
    """What a settlement asks of each worker of a cycle, in this order."""

    FREEZE = "freeze"
    """Set so many lent and borrowed blocks apart: not to be allocated, returned or recalled otherwise."""
    COPY = "copy"
    """Copy the next set-apart borrowed blocks home, into bounce buffers."""
    COMMIT = "commit"
    """Use the copies from now on, and return the originals to the creditor."""
    UNFREEZE = "unfreeze"
    """Over, or given up: copies that were not committed are dropped."""


class Settle(Message, frozen=True, kw_only=True):
    """Ledger → worker: one step of a settlement. The same step again gets the same answer."""

    settlement: Text
    """Unique: the ledger's instance, incarnation and a count."""
    phase: SettlePhase
    round: Count = 0
    """Of copy and commit, from 0: each moves what the bounce buffers hold."""
    creditor_id: OptionalId = ""
    """Whom this worker owes (freeze)."""
    debtor_id: OptionalId = ""
    """Who owes this worker (freeze)."""
    blocks: Count = 0
    """To settle in all (freeze), or in this round (copy, commit), of the worker's own size."""
    valid_for_s: Seconds = 5.0
    """A worker that hears nothing for so long gives the settlement up by itself."""


class Settled(Message, frozen=True, kw_only=True):
    """Worker → ledger: how many blocks the step is good for; 0: this worker cannot take part."""

    settlement: Text
    phase: SettlePhase
    round: Count = 0
    blocks: Count = 0
    bounce_blocks: Count = 0
    """Free to copy into (freeze)."""


class CreditorOffered(Message, frozen=True, kw_only=True):
    """Ledger → every ledger: a debtor was pointed to a creditor; both it and refusals spread by this."""

    ledger_id: Id
    debtor_id: Id
    creditor_id: OptionalId = ""
    tokens: Count = 0
    tier: KvTier = KvTier.DEVICE
    """Of what was pointed out."""
    refused_by: tuple[Id, ...] = ()
    refused_host_by: tuple[Id, ...] = ()


class LedgerAnnounced(Message, frozen=True, kw_only=True):
    """Ledger → every ledger, itself included, at a fixed interval: it is there and would settle debts."""

    ledger_id: Id
    incarnation: Number
