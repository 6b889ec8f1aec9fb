"""Who shares stored prefixes with whom: requests of one key, and of one `cache_salt` if they send any.

Otherwise a tenant could learn from the time to the first token what another one has asked. Pure.
"""

from hashlib import blake2b

SALT_BYTES = 16


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """Of a request: `tenant` is the digest of its key, `cache_salt` what it asks for."""
    digest = blake2b(digest_size=SALT_BYTES)
    for part in (tenant, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()
