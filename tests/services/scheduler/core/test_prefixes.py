"""Names of waiting prompts are those that workers give their blocks."""

import msgspec

from services.scheduler.core.sequence import MOST_KINDS, kinds_of, names_of
from shared.blocks import HASH_BYTES, chain, fingerprint, root
from shared.messages.prefixes import MOST_CHAIN_BLOCKS
from shared.messages.sequence import pack_tokens
from tests.services.placement.rig import report
from tests.services.scheduler.core.builders import sequence

PRINT = fingerprint(model="m", dtype="float32", layout="l", block_tokens=2)


def test_workers_of_one_kind_share_a_chain_and_others_have_none() -> None:
    plain = report("w0")
    kinds = kinds_of(
        [plain, *(msgspec.structs.replace(plain, fingerprint=PRINT, caches_prefixes=True) for _ in range(2))]
    )
    assert kinds == ((PRINT, plain.block_tokens),)
    many = [msgspec.structs.replace(plain, fingerprint=bytes([n]), caches_prefixes=True) for n in range(1, 9)]
    assert len(kinds_of(many)) == MOST_KINDS
    assert kinds_of(many) == kinds_of(many[::-1])


def test_a_chain_names_the_whole_blocks_of_the_prompt_under_its_salt() -> None:
    waiting = sequence("a", 0.0, generated=1)
    assert waiting.spec is not None
    (names,) = names_of(waiting, ((PRINT, 2),))
    assert names.block_tokens == 2
    assert names.names == b"".join(chain(root(PRINT), waiting.spec.prompt, 2))
    waiting.spec = msgspec.structs.replace(waiting.spec, cache_salt=b"tenant")
    assert names_of(waiting, ((PRINT, 2),)) == (names,), "computed once"
    (salted,) = names_of(waiting, ((PRINT, 4),))
    assert salted.names == b"".join(chain(root(PRINT, b"tenant"), waiting.spec.prompt, 4))


def test_names_are_bounded_and_need_a_prompt() -> None:
    waiting = sequence("a", 0.0, generated=1)
    assert waiting.spec is not None
    waiting.spec = msgspec.structs.replace(waiting.spec, prompt=pack_tokens(range(5000)))
    (names,) = names_of(waiting, ((PRINT, 2),))
    assert len(names.names) == MOST_CHAIN_BLOCKS * HASH_BYTES
    assert names_of(waiting, ()) == ()
    waiting.spec = None
    assert names_of(waiting, ((PRINT, 2),)) == ()
