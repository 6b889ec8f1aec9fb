"""A block's name says its tokens, all before them, the model and the tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.blocks import HASH_BYTES, chain, child, fingerprint, root
from shared.messages.sequence import pack_tokens

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
ROOT = root(b"fingerprint")
PARTS = {"model": "llama", "dtype": "float32", "layout": "v1"}


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_two_chains_share_what_their_tokens_share(first: list[int], second: list[int], block: int) -> None:
    names = [chain(ROOT, pack_tokens(tokens), block) for tokens in (first, second)]
    assert len(names[0]) == len(first) // block
    for end in range(1, min(map(len, names)) + 1):
        same = first[: end * block] == second[: end * block]
        assert (names[0][end - 1] == names[1][end - 1]) == same


@given(TOKENS, st.integers(1, 8))
def test_a_chain_grows_block_by_block(tokens: list[int], block: int) -> None:
    parent = ROOT
    for index, name in enumerate(chain(ROOT, pack_tokens(tokens), block)):
        parent = child(parent, pack_tokens(tokens[index * block : (index + 1) * block]))
        assert name == parent
        assert len(name) == HASH_BYTES


def test_tenants_and_models_share_no_block() -> None:
    tokens = pack_tokens([1, 2, 3, 4])
    roots = [ROOT, root(b"fingerprint", b"tenant"), root(b"fingerprint", b"other"), root(b"another model")]
    assert len({chain(each, tokens, 4)[0] for each in roots}) == len(roots)


@pytest.mark.parametrize("part", PARTS)
def test_a_fingerprint_depends_on_every_part(part: str) -> None:
    other = fingerprint(**{**PARTS, part: "another"}, block_tokens=16)
    assert other != fingerprint(**PARTS, block_tokens=16) != fingerprint(**PARTS, block_tokens=32)


def test_parts_do_not_run_into_each_other() -> None:
    first = fingerprint(model="ab", dtype="c", layout="e", block_tokens=16)
    assert first != fingerprint(model="a", dtype="bc", layout="e", block_tokens=16)


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="7 bytes"):
        chain(ROOT, bytes(7), 1)
