"""Who shares stored prefixes with whom."""

from services.gateway.http.completion_response import SALT_BYTES, salt_of


def test_keys_and_salts_keep_apart() -> None:
    salts = [salt_of(tenant, salt) for tenant in ("", "a", "ab") for salt in ("", "b", "x")]
    assert len(set(salts)) == len(salts) and {len(salt) for salt in salts} == {SALT_BYTES}
    assert salt_of("a", "b") == salt_of("a", "b")


def test_any_text_is_a_salt() -> None:
    assert salt_of("a", "\ud800") != salt_of("a", "")
