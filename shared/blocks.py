"""What a block of KV is called: a hash over its tokens and all before them, chained from a fingerprint.

Two blocks of one name hold the same bytes, on whatever worker and tier: the name covers the model (class,
configuration, weights), the layout and the dtype, the tenant's salt, and all tokens from the beginning of the
sequence. Knows no tensor and no tier. Source: papers/002 §IV; `algorithms.md` §5.
"""

from hashlib import blake2b

from shared.messages.sequence import TOKEN_BYTES

BlockHash = bytes
"""16 bytes."""
HASH_BYTES = 16


def fingerprint(*, model: str, dtype: str, layout: str, block_tokens: int) -> bytes:
    """Names what must agree for KV to be exchanged: 16 bytes, never empty.

    `model` is a digest of everything that KV is computed by: class, configuration and weights.
    """
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (model, dtype, layout, str(block_tokens)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()


def root(fingerprint: bytes, salt: bytes = b"") -> BlockHash:
    """The parent of every first block. Tenants with different salts never share a block."""
    return blake2b(salt, digest_size=HASH_BYTES, key=fingerprint).digest()


def child(parent: BlockHash, tokens: bytes) -> BlockHash:
    """The name of the block whose tokens (packed, `pack_tokens`) follow `parent`."""
    return blake2b(tokens, digest_size=HASH_BYTES, key=parent).digest()


def chain(parent: BlockHash, tokens: bytes, block_tokens: int) -> list[BlockHash]:
    """Names of the whole blocks of `tokens` (packed), in order; what is left over has no name.

    Raises ValueError when `tokens` is not a whole number of tokens.
    """
    if len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are no whole number of tokens")
    size = block_tokens * TOKEN_BYTES
    names: list[BlockHash] = []
    for first in range(0, len(tokens) - size + 1, size):
        parent = child(parent, tokens[first : first + size])
        names.append(parent)
    return names
