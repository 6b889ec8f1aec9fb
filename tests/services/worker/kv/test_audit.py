"""Hits that are computed all the same: what is right stays, what is wrong is found before others read it."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.engine import TorchEngine
from services.worker.kv.audit import SampledAudit
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.tiers.records import Records
from shared.messages.sequence import FinishReason
from tests.services.worker.prefix_rig import BLOCK_TOKENS, PrefixRig, make_engine
from tests.shared.messages.builders import plan, prefill, ref, spec

AUDITS = PrefixCacheConfig(audit_rate=1.0)
PROMPT = [(7 * at) % 90 + 1 for at in range(18)]
WHOLE = len(PROMPT) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return make_engine()


@pytest.fixture(scope="module")
def roomy() -> TorchEngine:
    return make_engine(64)


@pytest.fixture(scope="module")
def other() -> TorchEngine:
    return make_engine()


@pytest.fixture
def rig(engine: TorchEngine) -> Iterator[PrefixRig]:
    made = PrefixRig(engine, AUDITS, host_blocks=12)
    yield made
    made.close()


def auditor(rig: PrefixRig) -> SampledAudit:
    assert rig.store is not None and rig.store.auditor is not None
    return rig.store.auditor


def stored(rig: PrefixRig, prompt: list[int]) -> list[int]:
    """The blocks that a prompt's beginning lies in."""
    held = rig.table.find(ref(f"r{rig._names}"))
    assert held is not None and rig.prefixes is not None
    blocks = rig.prefixes.cache.hold(held.names[: len(prompt) // BLOCK_TOKENS])
    rig.prefixes.cache.release(blocks)
    return blocks


prompts = st.builds(
    lambda words, tail: [token for word in words for token in range(word, word + 8)] + [1] * tail,
    st.lists(st.sampled_from((10, 20, 30)), min_size=1, max_size=3),
    st.integers(1, 6),
)


@settings(max_examples=40)
@given(st.lists(st.lists(prompts, min_size=1, max_size=2), min_size=1, max_size=6), st.integers(3, 40))
def test_rounding_is_no_mistake_and_the_text_is_the_same(
    roomy: TorchEngine, other: TorchEngine, waves: list[list[list[int]]], chunk: int
) -> None:
    rig = PrefixRig(roomy, AUDITS, host_blocks=12)  # what is compared is there twice for a while
    plain = PrefixRig(other, None)
    for wave in waves:
        assert rig.serve(wave, chunk=chunk) == plain.serve(wave)
        rig.check_integrity()
    assert auditor(rig).wrong_blocks == 0
    rig.close()


def test_a_hit_is_computed_and_compared(rig: PrefixRig) -> None:
    first = rig.serve([PROMPT], chunk=40)
    assert rig.serve([PROMPT], chunk=40) == first
    assert rig.prefilled_tokens == 2 * len(PROMPT) and rig.hits == []
    assert auditor(rig).audited_blocks == WHOLE
    rig.check_integrity()


@pytest.mark.parametrize("at", range(WHOLE))
def test_what_is_wrong_is_forgotten_and_who_reads_it_is_computed_again(rig: PrefixRig, at: int) -> None:
    first = rig.serve([PROMPT], chunk=40)
    blocks = stored(rig, PROMPT)
    auditor(rig)._rate = 0.0
    rig.core.on_plan(plan(50, starts=(spec(ref("x"), PROMPT),), prefills=(prefill(ref("x"), 0, 18),)), 0.0)
    assert rig.begin_step(0.0)[0] is not None
    reader = rig.table.find(ref("x"))
    assert reader is not None and list(reader.blocks[:WHOLE]) == blocks
    rig.engine.pools[1][0][blocks[at], 0, 0, 1] += 1.0
    auditor(rig)._rate = 1.0
    rig.plans = 60
    assert rig.serve([PROMPT], chunk=40) == first
    assert auditor(rig).wrong_blocks == 1
    assert reader.finish_reason is FinishReason.KV_LOST
    assert stored(rig, PROMPT)[:at] == blocks[:at], "what precedes it was right"
    assert len(stored(rig, PROMPT)) == WHOLE, "and is stored anew from there on"
    assert blocks[at] not in stored(rig, PROMPT)
    assert rig.serve([PROMPT], chunk=40) == first and auditor(rig).wrong_blocks == 1
    rig.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_of_the_digits_are_no_rounding(dtype: torch.dtype) -> None:
    key, value = torch.randn(3, 1, 2, 4).to(dtype), torch.randn(3, 1, 4, 2).to(dtype)
    for pool in (key, value):
        pool[1:] = pool[0]
    audit = SampledAudit(Records([(key, value)]), [(key, value)], 1.0)
    assert audit.tolerance == pytest.approx(torch.finfo(dtype).eps ** 0.5, rel=0.5)
    assert audit.agree(0, 1)
    largest = value[0].abs().max()
    value[1, 0, 0, 0] += largest * audit.tolerance / 4
    assert audit.agree(0, 1)
    value[1, 0, 0, 0] += largest * audit.tolerance * 4
    assert not audit.agree(0, 1) and audit.agree(0, 2)
    key[2, 0, 0, 0] = torch.nan
    assert not audit.agree(0, 2)


def test_whole_numbers_are_equal_or_not() -> None:
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    tokens[1] = tokens[0]
    audit = SampledAudit(Records([(tokens,)]), [(tokens,)], 1.0)
    assert audit.agree(0, 1)
    tokens[1, 3] += 1
    assert not audit.agree(0, 1)
