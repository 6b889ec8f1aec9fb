"""Which blocks of prompts lie in which worker's prefix cache: events, the question after a gap, chains.

Names are `shared.blocks.BlockHash`es, packed one after the other. News say how things stand, not what
happened: taking one in twice changes nothing.
"""

from shared.blocks import HASH_BYTES
from shared.messages.base import Message
from shared.messages.sequence import check_packed
from shared.messages.values import Count, Id, Number, PositiveCount

MOST_CHAIN_BLOCKS = 256
"""Names of one prompt that travel to placement; what comes after them is not weighed."""
MOST_NEWS_BLOCKS = 32_768
"""Names in one message: 0.6 MB."""


class PrefixChain(Message, frozen=True, kw_only=True):
    """A prompt's whole blocks from its beginning on, as workers of one fingerprint name them."""

    block_tokens: PositiveCount
    names: bytes
    """Packed, at most `MOST_CHAIN_BLOCKS`."""

    def __post_init__(self) -> None:
        check_packed(self.names, HASH_BYTES)


class WorkerPrefixes(Message, frozen=True, kw_only=True):
    """What changed in a worker's prefix cache, and its answer to `FindPrefixes`."""

    worker_id: Id
    incarnation: Number
    seq: Number
    """Counts the events of this incarnation, from 1; an answer has that of the last event it covers."""
    added: bytes = b""
    """Packed names of blocks that are stored."""
    tiers: bytes = b""
    """One byte for each of `added`: the nearest tier that has it (0 device, 1 host, 2 disk, 3
    host memory that another worker lends)."""
    removed: bytes = b""
    """Packed names of blocks that are stored nowhere any more."""
    full: bool = False
    """Nothing else is stored, or was left out because it is too much for one message."""

    def __post_init__(self) -> None:
        check_packed(self.added, HASH_BYTES)
        check_packed(self.removed, HASH_BYTES)
        if len(self.tiers) * HASH_BYTES != len(self.added):
            raise ValueError(f"{len(self.tiers)} tiers for {len(self.added) // HASH_BYTES} blocks")


class ForgetPrefixes(Message, frozen=True, kw_only=True):
    """Gateway → worker, for its operator: empty the prefix cache; blocks in use stay."""

    sender: Id


class PrefixesForgotten(Message, frozen=True, kw_only=True):
    """How many blocks the cache has forgotten."""

    blocks: Count = 0


class FindPrefixes(Message, frozen=True, kw_only=True):
    """Placement → worker: what changed after event `since_seq`; everything where that is forgotten."""

    incarnation: Number
    since_seq: Number = 0
