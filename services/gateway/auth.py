"""Bearer keys: compared by hash and in constant time; everything is refused that is not open on purpose.

Knows hashes only; the keys themselves are nowhere in the configuration.
"""

import hashlib
import hmac
from collections.abc import Sequence

from shared.errors import Unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes: no key needed, nothing secret in the answer."""
OPERATOR_PATHS = OPEN_PATHS | {"/metrics"}
"""The same on the operator's listener."""


class KeyRing:
    """The accepted keys. Without any, nobody gets in."""

    def __init__(self, key_sha256: Sequence[str]) -> None:
        self._hashes = tuple(key_sha256)

    def check(self, authorization: str | None) -> str:
        """The digest, in hex, of the key in `Authorization: Bearer …`. Raises Unauthorized."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key: send it in a header, as in 'Authorization: Bearer sk-…'")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        if not any(matches):
            raise Unauthorized("Incorrect API key provided.")
        return digest
