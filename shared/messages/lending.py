"""Messages about lent KV: between workers, and from the ledger that settles cycles of debt.

A *grant* is a set of blocks that a creditor holds for one debtor under a lease. Every change of the set
raises the grant's generation. Accesses name both, and fail if a block has since left the grant. Block ids and
`block_tokens` are the creditor's. KV data itself travels over the bulk plane. Source: papers/001 §4.3–4.5;
`algorithms.md` §4.
"""

from enum import StrEnum

from shared.messages.base import Message
from shared.messages.values import Count, Digest, Id, Number, OptionalId, Seconds, Text


class AskTicket(Message, frozen=True, kw_only=True):
    """Worker → worker: request a ticket for a bulk-plane connection."""

    worker_id: Id
    incarnation: Number


class BulkTicket(Message, frozen=True, kw_only=True):
    """Addresses and credentials for a bulk-plane connection."""

    incarnation: Number
    """Incarnation of the worker that replies."""
    addresses: dict[Id, Text]
    """Address per transport."""
    host: Text = ""
    """Host name; workers on the same host may use host-local transports."""
    ticket: bytes


MOST_GRANT_BLOCKS = 65_536
"""Maximum number of block ids in one grant: 0.3 MB."""


class KvTier(StrEnum):
    """Memory tier of the creditor that holds lent blocks."""

    DEVICE = "device"
    HOST = "host"


class Refusal(StrEnum):
    """Reason why a creditor lends nothing now."""

    NOTHING_FREE = "nothing_free"
    """Its memory is in use or reserved for its own sequences."""
    AT_CAP = "at_cap"
    """It has reached its lending limit."""
    NOT_LENDING = "not_lending"
    """Lending is switched off, or frozen by a settlement."""
    OTHER_KV = "other_kv"
    """Its blocks do not match the debtor's: different model, layout or dtype."""


class BorrowBlocks(Message, frozen=True, kw_only=True):
    """Debtor → creditor. Idempotent: a repeated `request` number returns the same grant."""

    debtor_id: Id
    debtor_incarnation: Number
    request: Number
    """Number of this borrow request within the debtor's incarnation, from 1."""
    blocks: Count
    least_blocks: Count = 1
    """A grant of fewer is of no use."""
    tier: KvTier = KvTier.DEVICE
    fingerprint: Digest = b""
    """Fingerprint that must match to exchange KV (`shared.blocks`); an empty one is refused."""
    for_cache: bool = False
    """True if the blocks will hold only cached KV; the creditor may then end the grant at any time."""


class Grant(Message, frozen=True, kw_only=True):
    """Set of blocks lent to one debtor."""

    creditor_id: Id
    creditor_incarnation: Number
    grant_id: Number
    """Unique within the creditor's incarnation."""
    generation: Number
    tier: KvTier = KvTier.DEVICE
    blocks: tuple[Count, ...]
    """Physical block ids at the creditor."""
    lease_s: Seconds
    """Lease length, counted from when the debtor sent its request; the creditor adds a margin."""
    attends: bool = True
    """True if the creditor computes attention over the blocks; False: it only stores them."""


class BorrowReply(Message, frozen=True, kw_only=True):
    """Creditor → debtor: a full or partial grant, or the reason for refusing."""

    grant: Grant | None = None
    refusal: Refusal | None = None


class HeldGrant(Message, frozen=True, kw_only=True):
    """A grant and its generation, as the debtor knows them."""

    grant_id: Number
    generation: Number


class RenewLeases(Message, frozen=True, kw_only=True):
    """Debtor → creditor, several times per lease: renew the leases of grants in use. Others expire."""

    debtor_id: Id
    debtor_incarnation: Number
    creditor_incarnation: Number
    held: tuple[HeldGrant, ...]


class LeasesRenewed(Message, frozen=True, kw_only=True):
    """Creditor → debtor: reply to `RenewLeases`."""

    creditor_incarnation: Number
    lease_s: Seconds
    held: tuple[HeldGrant, ...] = ()
    """Renewed grants with their current generation. A grant missing here has ended, and its KV is lost."""
    wanted_back_blocks: Count = 0
    """Number of lent blocks that the creditor needs back from this debtor."""


class ReturnBlocks(Message, frozen=True, kw_only=True):
    """Debtor → creditor: return blocks of a grant that are no longer needed. Idempotent."""

    debtor_id: Id
    debtor_incarnation: Number
    creditor_incarnation: Number
    grant_id: Number
    blocks: tuple[Count, ...]


class BlocksReturned(Message, frozen=True, kw_only=True):
    """Creditor → debtor: the blocks are free; the remaining grant has this generation."""

    generation: Number


class SettlePhase(StrEnum):
    """Steps of a settlement, in the order that every worker of the cycle runs them."""

    FREEZE = "freeze"
    """Reserve the lent and borrowed blocks: they cannot be allocated, returned or recalled otherwise."""
    COPY = "copy"
    """Copy the next reserved borrowed blocks into local bounce buffers."""
    COMMIT = "commit"
    """Switch to the copies, and return the originals to the creditor."""
    UNFREEZE = "unfreeze"
    """End or abort the settlement; uncommitted copies are dropped."""


class Settle(Message, frozen=True, kw_only=True):
    """Ledger → worker: run one step of a settlement. Idempotent."""

    settlement: Text
    """Unique id: ledger instance, incarnation and a counter."""
    phase: SettlePhase
    round: Count = 0
    """Round of copy and commit, from 0; each moves as many blocks as the bounce buffers hold."""
    creditor_id: OptionalId = ""
    """Worker that this worker owes (freeze)."""
    debtor_id: OptionalId = ""
    """Worker that owes this worker (freeze)."""
    blocks: Count = 0
    """Blocks to settle in total (freeze) or in this round (copy, commit), in the worker's own block size."""
    valid_for_s: Seconds = 5.0
    """The worker aborts the settlement after this long without a message."""


class Settled(Message, frozen=True, kw_only=True):
    """Worker → ledger: number of blocks that the step covers; 0: this worker cannot take part."""

    settlement: Text
    phase: SettlePhase
    round: Count = 0
    blocks: Count = 0
    bounce_blocks: Count = 0
    """Free bounce buffers in blocks (freeze)."""


class CreditorOffered(Message, frozen=True, kw_only=True):
    """Ledger → every ledger: a creditor was suggested to a debtor. Also shares the refusals."""

    ledger_id: Id
    debtor_id: Id
    creditor_id: OptionalId = ""
    tokens: Count = 0
    tier: KvTier = KvTier.DEVICE
    """Tier of the suggested memory."""
    refused_by: tuple[Id, ...] = ()
    refused_host_by: tuple[Id, ...] = ()


class LedgerAnnounced(Message, frozen=True, kw_only=True):
    """Ledger → every ledger, itself included, at a fixed interval: it is alive and can settle debts."""

    ledger_id: Id
    incarnation: Number
