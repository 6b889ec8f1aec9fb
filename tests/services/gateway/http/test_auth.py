"""Keys: only the right one, and nothing without."""

import hashlib

import pytest

from services.gateway.http.middleware import OPEN_PATHS, OPERATOR_PATHS, KeyRing
from shared.errors import Unauthorized


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_each_accepted_key_opens() -> None:
    ring = KeyRing([digest("sk-a"), digest("sk-b")])
    assert ring.check("Bearer sk-a") == digest("sk-a")
    assert ring.check("bearer  sk-b ") == digest("sk-b")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "sk-a", "Basic sk-a", "Bearer sk-A", "Bearer sk-a2", "Bearer \xe9"],
)
def test_anything_else_does_not(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        KeyRing([digest("sk-a")]).check(header)


def test_no_keys_no_entry_and_a_hash_is_no_key() -> None:
    with pytest.raises(Unauthorized):
        KeyRing([]).check("Bearer sk-a")
    with pytest.raises(Unauthorized):
        KeyRing([digest("sk-a")]).check(f"Bearer {digest('sk-a')}")


def test_only_probes_are_open() -> None:
    assert {"/health", "/ready"} == OPEN_PATHS
    assert {"/health", "/ready", "/metrics"} == OPERATOR_PATHS
