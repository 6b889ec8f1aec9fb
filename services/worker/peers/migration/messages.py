"""What a worker says to another from which it fetches blocks: headers of bulk messages.

Kinds: `kv.blocks` names blocks and takes them back, one buffer each, up to the first that is not there;
`kv.probe` takes bytes of no meaning back, for measuring. Knows neither tensors nor links.
"""

import msgspec

from shared.blocks import HASH_BYTES, BlockHash
from shared.errors import InvalidMessage
from shared.messages.base import decode

BLOCKS, PROBE = "kv.blocks", "kv.probe"
MOST_BLOCKS = 256
"""Of one message."""
MOST_PROBE_BYTES = 4 << 20


class Wanted(msgspec.Struct, frozen=True):
    """Header of `kv.blocks`: consecutive blocks of one sequence."""

    fingerprint: bytes
    names: tuple[BlockHash, ...]


class Given(msgspec.Struct, frozen=True):
    """Header of the answer."""

    checksums: tuple[int, ...]
    """Of each block that comes along, over its bytes, name and fingerprint (`kv.tiers.checksum`)."""


class LinkProbe(msgspec.Struct, frozen=True):
    """Header of `kv.probe`."""

    size_bytes: int


def read_wanted(header: bytes) -> Wanted:
    """Raises InvalidMessage."""
    wanted = decode(header, Wanted)
    if not 0 < len(wanted.names) <= MOST_BLOCKS or any(len(name) != HASH_BYTES for name in wanted.names):
        raise InvalidMessage(f"1 to {MOST_BLOCKS} names of blocks, {HASH_BYTES} bytes each, are asked for")
    return wanted


def read_given(header: bytes) -> Given:
    """Raises InvalidMessage."""
    return decode(header, Given)


def read_probe(header: bytes) -> LinkProbe:
    """Raises InvalidMessage."""
    probe = decode(header, LinkProbe)
    if not 0 < probe.size_bytes <= MOST_PROBE_BYTES:
        raise InvalidMessage(f"a probe has 1 to {MOST_PROBE_BYTES} bytes")
    return probe
