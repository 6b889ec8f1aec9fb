"""Contents of workers' prefix caches: updates, the query after a gap, and block-hash chains of prompts. Names
are packed `shared.blocks.BlockHash`es. Updates state the result, so applying one twice changes nothing."""

from shared.blocks import HASH_BYTES
from shared.messages.base import Message
from shared.messages.sequence import check_packed
from shared.messages.values import Count, Id, Number, PositiveCount

MOST_CHAIN_BLOCKS = 256
"""Maximum number of names per prompt sent to placement; later blocks are ignored."""
MOST_NEWS_BLOCKS = 32_768
"""Maximum number of names in one message: 0.6 MB."""


class PrefixChain(Message, frozen=True, kw_only=True):
    """Hashes of a prompt's leading whole blocks, for workers with the same fingerprint."""

    block_tokens: PositiveCount
    names: bytes
    """Packed names, at most `MOST_CHAIN_BLOCKS`."""

    def __post_init__(self) -> None:
        check_packed(self.names, HASH_BYTES)


class WorkerPrefixes(Message, frozen=True, kw_only=True):
    """Changes in a worker's prefix cache; also the reply to `FindPrefixes`."""

    worker_id: Id
    incarnation: Number
    seq: Number
    """Number of the event within this incarnation, from 1; in a reply, the last event that it covers."""
    added: bytes = b""
    """Packed names of stored blocks."""
    tiers: bytes = b""
    """One byte per name in `added`, the fastest tier that holds it: 0 device, 1 host, 2 disk, 3 host memory
    lent by another worker."""
    removed: bytes = b""
    """Packed names of blocks that no tier stores any more."""
    full: bool = False
    """True if this lists the whole cache, up to what fits one message."""

    def __post_init__(self) -> None:
        check_packed(self.added, HASH_BYTES)
        check_packed(self.removed, HASH_BYTES)
        if len(self.tiers) * HASH_BYTES != len(self.added):
            raise ValueError(f"{len(self.tiers)} tiers for {len(self.added) // HASH_BYTES} blocks")


class ForgetPrefixes(Message, frozen=True, kw_only=True):
    """Gateway → worker, for the operator: empty the prefix cache. Blocks in use stay."""

    sender: Id


class PrefixesForgotten(Message, frozen=True, kw_only=True):
    """Number of blocks that the cache dropped."""

    blocks: Count = 0


class FindPrefixes(Message, frozen=True, kw_only=True):
    """Placement → worker: changes after event `since_seq`; if that is too old, the whole cache."""

    incarnation: Number
    since_seq: Number = 0
