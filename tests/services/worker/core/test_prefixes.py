"""Shared prefixes change what is computed, never what is answered."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core.plans import StepWork, WorkItem
from services.worker.core.prefixes import Prefixes
from services.worker.core.sequence import HeldSequence
from services.worker.core.settings import PrefixCacheConfig
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine_thread import row_of
from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.residency import Residency
from services.worker.kv.core.tier_copier import BlockMover
from shared.messages.plans import BatchPlan, Preemption, PreemptMode, SkipReason
from shared.messages.sequence import FinishReason
from tests.services.worker.conftest import VOCABULARY, new_model
from tests.services.worker.kv.rig import flip_byte
from tests.services.worker.prefix_rig import BLOCK_TOKENS, DEVICE_BLOCKS, PrefixRig, make_engine
from tests.shared.messages.builders import plan, prefill, ref, spec

_DICE = random.Random(11)
PIECES = [[_DICE.randrange(VOCABULARY) for _ in range(8)] for _ in range(4)]
DEVICE_ONLY = PrefixCacheConfig()
Waves = list[list[list[int]]]


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return make_engine()


@pytest.fixture
def rig(engine: TorchEngine) -> Iterator[PrefixRig]:
    """A worker that caches on its device alone."""
    made = PrefixRig(engine, DEVICE_ONLY)
    yield made
    made.close()


@pytest.fixture(scope="module")
def answers() -> "Answers":
    return Answers(make_engine())


class Answers:
    """What a worker without a prefix cache says, each prompt asked once."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, ...], list[int]] = {}

    def of(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        for prompt in prompts:
            if tuple(prompt) not in self._known:
                (self._known[tuple(prompt)],) = PrefixRig(self._engine, None).serve([prompt])
        return [self._known[tuple(prompt)] for prompt in prompts]


def prompt_of(pieces: Sequence[int], tail: int) -> list[int]:
    """Beginnings that many prompts share, and an end of `tail` tokens."""
    return [token for piece in pieces for token in PIECES[piece]] + list(range(1, tail + 1))


def test_a_block_that_came_with_growth_is_named_like_any_other() -> None:
    """Ids that are beyond the device's count are the worker's own: none of them was ever found again."""
    residency = Residency(8, 16, 4, lambda moved: None, nullcontext())
    pool = GrownPool(8, BLOCK_TOKENS, residency)
    prefixes = Prefixes(PrefixCache(pool, Tiers(), cast(BlockMover, None), CostGate()), b"f")
    assert residency.reserve(2, at_once=True)
    pool.resize(10)
    held = HeldSequence.from_spec(spec(ref("r"), list(range(11 * BLOCK_TOKENS))), 64, 0.0)
    held.blocks.extend(prefixes.cache.allocate(10))
    assert max(held.blocks) >= 8
    held.computed_tokens = 10 * BLOCK_TOKENS
    prefixes.publish(held)
    assert prefixes.cache.known_blocks(held.names) == 10


prompts = st.builds(prompt_of, st.lists(st.integers(0, 3), max_size=3), st.integers(1, 6))
waves_of = st.lists(st.lists(prompts, min_size=1, max_size=2), min_size=1, max_size=10)


@settings(max_examples=40)
@given(
    waves=waves_of,
    host_blocks=st.integers(0, 12),
    has_disk=st.booleans(),
    eviction=st.sampled_from(["frequent", "lru", "fifo", "random"]),
    chunk=st.integers(3, 40),
    damage=st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=10),
)
def test_under_eviction_storms_and_damage_the_text_is_the_same(
    engine: TorchEngine,
    answers: Answers,
    waves: Waves,
    host_blocks: int,
    has_disk: bool,
    eviction: str,
    chunk: int,
    damage: list[tuple[bool, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"eviction": eviction, "disk_path": folder, "disk_mb": int(has_disk and host_blocks > 0)}
        rig = PrefixRig(engine, PrefixCacheConfig.model_validate(tiers), host_blocks=host_blocks)
        for number, wave in enumerate(waves):
            assert rig.serve(wave, chunk=chunk) == answers.of(wave)
            rig.check_integrity()
            if number < len(damage):
                flip_a_byte(rig, Path(folder), *damage[number])
        rig.close()


def flip_a_byte(rig: PrefixRig, folder: Path, on_disk: bool, at: int) -> None:
    """Of whatever is in a lower tier."""
    assert rig.store is not None
    if on_disk:
        for path in folder.glob("*.kv"):
            flip_byte(path, at % path.stat().st_size, 0x40)
    elif rig.store.host.slots:
        row = rig.store.host.row(at % rig.store.host.slots)
        row[at % len(row)] ^= 0x40


def test_a_prompt_asked_again_leaves_its_last_block_to_be_computed(rig: PrefixRig) -> None:
    prompt = prompt_of([0, 1, 2], 1)
    first = rig.serve([prompt])
    assert rig.prefilled_tokens == 25 and rig.hits == []
    assert rig.serve([prompt]) == first
    assert rig.prefilled_tokens == 25 + 1
    assert rig.hits[0].cached_tokens == 24, "promised with the first chunk, beyond its own end"
    assert sum(hit.blocks[0] for hit in rig.hits) == 24 // BLOCK_TOKENS
    (held,) = [one for one in rig.table.reports(0.0) if one.ref.request_id == "r2"]
    sequence = rig.table.find(held.ref)
    assert sequence is not None and sequence.cached_tokens == 24


def computed(rig: PrefixRig, message: BatchPlan) -> StepWork:
    rig.core.on_plan(message, 0.0)
    work, _ = rig.begin_step(0.0)
    assert work is not None
    rig.core.finish_step(work, rig.engine.step([row_of(item) for item in work.items]), 0.0, 0.01)
    return work


def test_a_preempted_sequence_finds_what_it_had(rig: PrefixRig) -> None:
    tokens = prompt_of([0, 1], 2)
    computed(rig, plan(1, starts=(spec(ref(), tokens),), prefills=(prefill(ref(), 0, 18),)))
    work = computed(rig, plan(2, preempt=(ref(),), prefills=(prefill(ref(), 0, 19),)))
    assert [item.first_token for item in work.items] == [16]
    assert work.hits[0].cached_tokens == 16
    rig.core.check_integrity()


SWAPS = PrefixCacheConfig(swap_share=0.5)


@settings(max_examples=40)
@given(
    waves=st.lists(st.lists(prompts, min_size=1, max_size=2), min_size=1, max_size=4),
    host_blocks=st.integers(0, 24),
    chunk=st.integers(3, 40),
    preemptions=st.dictionaries(
        st.integers(1, 12), st.tuples(st.integers(0, 1), st.sampled_from(list(PreemptMode))), max_size=6
    ),
)
def test_whatever_is_swapped_the_text_is_the_same_and_nothing_stays_kept(
    engine: TorchEngine,
    answers: Answers,
    waves: Waves,
    host_blocks: int,
    chunk: int,
    preemptions: dict[int, tuple[int, PreemptMode]],
) -> None:
    rig = PrefixRig(engine, PrefixCacheConfig(), host_blocks=host_blocks)
    assert rig.prefixes is not None
    for wave in waves:
        assert rig.serve(wave, chunk=chunk, preemptions=preemptions) == answers.of(wave)
        rig.check_integrity()
        assert rig.prefixes.cache.kept_blocks == 0
    rig.close()


def test_a_swapped_sequence_comes_back_after_a_storm(engine: TorchEngine) -> None:
    """On the device nothing is left of it; all but its unfinished last block comes from the host."""
    rig, held = _swapped(engine)
    for at in range(4):
        rig.serve([[5 + at] * 27])
    rig.hits.clear()
    work = computed(rig, plan(100, prefills=(prefill(ref("x"), 0, 19),)))
    assert [item.first_token for item in work.items] == [16]
    assert work.hits[0].blocks == (0, 4, 0)
    assert held.kept == [] and rig.prefixes is not None and rig.prefixes.cache.kept_blocks == 0
    rig.core.check_integrity()
    rig.close()


@pytest.mark.parametrize("reason", ["cancelled", "dropped", "gateway lost"])
def test_whatever_ends_a_swapped_sequence_frees_the_host(engine: TorchEngine, reason: str) -> None:
    rig, held = _swapped(engine)
    if reason == "cancelled":
        rig.table.cancel(ref("x"), FinishReason.CANCELLED, 0.0)
    elif reason == "dropped":
        rig.table.apply_plan(plan(100, drops=(ref("x"),)), 0.0)
    else:
        for now_s in range(20):
            rig.table.tick(float(now_s))
    assert held.kept == [] and not held.alive
    assert rig.core.report(100.0).swap_room_blocks == 12
    rig.core.check_integrity()
    rig.close()


def _swapped(engine: TorchEngine) -> tuple[PrefixRig, HeldSequence]:
    """Preempted after 18 tokens and one of answer."""
    rig = PrefixRig(engine, SWAPS, host_blocks=24)
    rig.plans = 1
    sequence = spec(ref("x"), prompt_of([0, 1], 2))
    computed(rig, plan(1, starts=(sequence,), prefills=(prefill(ref("x"), 0, 18),)))
    swap = Preemption(ref=ref("x"), mode=PreemptMode.SWAP)
    assert rig.table.apply_plan(msgspec.structs.replace(plan(2), preemptions=(swap,)), 0.0) == []
    held = rig.table.find(ref("x"))
    assert held is not None and len(held.kept) == 4 and not held.blocks
    report = rig.core.report(0.0)
    assert report.swap_room_blocks == 8 and report.host_block_s > 0, "profiled at the start"
    rig.core.check_integrity()
    return rig, held


def test_a_chunk_after_a_promise_that_was_broken_is_computed_from_where_it_stands(rig: PrefixRig) -> None:
    prompt = prompt_of([0, 1, 2], 1)
    rig.serve([prompt])
    sequence = spec(ref("x"), prompt)
    rig.core.on_plan(plan(100, starts=(sequence,), prefills=(prefill(ref("x"), 0, 8),)), 0.0)
    assert rig.core.begin_step(0.0)[0] is None, "all of it is there"
    held = rig.table.find(ref("x"))
    assert held is not None and (held.computed_tokens, held.promised_tokens) == (8, 24)
    assert rig.store is not None
    rig.store.cache.release(rig.store.cache.allocate(DEVICE_BLOCKS - 2))
    prepared = rig.table.prepare(prefill(ref("x"), 24, 25), held)
    assert isinstance(prepared, WorkItem)
    assert (prepared.first_token, prepared.end_token) == (8, 25)
    assert rig.table.prepare(prefill(ref("x"), 25, 25), held) is SkipReason.MISALIGNED


def test_a_chunk_planned_by_an_earlier_promise_is_computed_after_a_smaller_one(rig: PrefixRig) -> None:
    """It was refused time and again, until the scheduler gave the request up."""
    prompt = prompt_of([0, 1, 2], 4)
    rig.serve([prompt])
    rig.core.on_plan(plan(100, starts=(spec(ref("x"), prompt),), prefills=(prefill(ref("x"), 0, 8),)), 0.0)
    assert rig.core.begin_step(0.0)[0] is None
    held = rig.table.find(ref("x"))
    assert held is not None and held.promised_tokens == 24 and rig.store is not None
    rig.store.cache.release(rig.store.cache.allocate(DEVICE_BLOCKS - 3))
    work = computed(rig, plan(101, prefills=(prefill(ref("x"), 8, 20),)))
    assert [(item.first_token, item.end_token) for item in work.items] == [(12, 20)]
    assert [hit.cached_tokens for hit in work.hits] == [12], "the others are gone"
    prepared = rig.table.prepare(prefill(ref("x"), 24, 28), held)
    assert isinstance(prepared, WorkItem) and (prepared.first_token, prepared.end_token) == (20, 28)


def test_a_disk_tier_of_another_configuration_is_not_served(tmp_path: Path) -> None:
    """A worker started anew after `rope_theta` was edited, with the weights as they were."""

    def engine(theta: float) -> TorchEngine:
        model = new_model("llama", rope_parameters={"rope_type": "default", "rope_theta": theta})
        return TorchEngine(describe(model), kv_blocks=DEVICE_BLOCKS, block_tokens=BLOCK_TOKENS)

    prompt = [(7 * place) % 90 + 1 for place in range(30)]
    expected = PrefixRig(engine(20.0), None).serve([prompt], max_tokens=8)
    config = PrefixCacheConfig(disk_mb=1, disk_path=str(tmp_path))
    for theta in (10_000.0, 20.0):
        rig = PrefixRig(engine(theta), config, host_blocks=64)
        found = rig.serve([prompt], max_tokens=8)
        assert rig.store is not None and rig.hits == []
        rig.store.close(5.0, 5.0)
    assert found == expected
