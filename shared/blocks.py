"""Block hashes: names of KV blocks, chained from a fingerprint over all tokens up to the block's end.

Blocks with the same hash hold the same bytes on every worker and tier. The hash covers the model (class,
configuration, weights), layout, dtype, tenant salt and all tokens from the sequence's beginning. Source:
papers/002 §IV; `algorithms.md` §5.
"""

from hashlib import blake2b

from shared.messages.sequence import TOKEN_BYTES

BlockHash = bytes
"""`HASH_BYTES` long."""
HASH_BYTES = 16


def fingerprint(*, model: str, dtype: str, layout: str, block_tokens: int) -> bytes:
    """Return the 16-byte fingerprint of everything that must match to exchange KV; never empty. `model` is a
    digest of class, configuration and weights."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (model, dtype, layout, str(block_tokens)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()


def root(fingerprint: bytes, salt: bytes = b"") -> BlockHash:
    """Return the parent of every first block. Different salts never share a block."""
    return blake2b(salt, digest_size=HASH_BYTES, key=fingerprint).digest()


def child(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Return the hash of the block with these packed tokens that follows `parent`."""
    return blake2b(tokens, digest_size=HASH_BYTES, key=parent).digest()


def chain(parent: BlockHash, tokens: bytes, block_tokens: int) -> list[BlockHash]:
    """Return the hashes of the whole blocks of packed `tokens`, in order; a partial block has none. Raise
    ValueError unless `tokens` is a whole number of tokens."""
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are no whole number of tokens")
    size = block_tokens * TOKEN_BYTES
    names: list[BlockHash] = []
    for first in range(0, len(tokens) - size + 1, size):
        parent = child(parent, tokens[first : first + size])
        names.append(parent)
    return names
