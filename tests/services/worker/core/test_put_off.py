"""Only the sequence that needs a stored block waits for it, its plans stay in step, and nothing is lost."""

import pytest

from services.worker.core.plans import StepWork
from services.worker.core.prefixes import Prefixes
from services.worker.core.sampling import Sampled
from services.worker.core.sequences import SequenceLimits
from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.tier_copier import Loaded
from shared.blocks import chain, root
from shared.messages.commands import TakeSnapshot
from shared.messages.plans import BatchPlan, PassedOver, StepOutcome, WorkerStepped
from shared.messages.reports import SequenceState
from shared.messages.sequence import FinishReason, SequenceRef, pack_tokens
from tests.services.worker.builders import core_of
from tests.services.worker.kv.rig import MemoryMover
from tests.shared.messages.builders import BLOCK_TOKENS, decode, plan, prefill, ref, spec

BLOCKS, STORED = 12, 3
LIMITS = SequenceLimits(64, 1000, end_retention_s=60.0, gateway_timeout_s=1000.0)
KNOWN = list(range(1, STORED * BLOCK_TOKENS + 3))
"""A prompt whose first blocks the host has, and nobody else."""
A, B = ref("a"), ref("b")


class Bench:
    """A worker whose loads end when a test says so."""

    def __init__(self) -> None:
        self.mover = MemoryMover()
        self.cache = PrefixCache(
            BlockPool(BLOCKS, BLOCK_TOKENS), Tiers(host_blocks=8), self.mover, CostGate()
        )
        self.core = core_of(self.cache, Prefixes(self.cache, b"f"), LIMITS)
        self.table = self.core._table
        self.reports: list[WorkerStepped] = []
        self.now_s = 0.0
        self.mover.publish(self.cache, chain(root(b"f"), pack_tokens(KNOWN), BLOCK_TOKENS))
        self.cache.release(self.cache.allocate(BLOCKS))

    def send(self, message: BatchPlan) -> None:
        self.reports += self.core.on_plan(message, self.now_s).stepped

    def step(self) -> StepWork | None:
        work, effects = self.core.begin_step(self.now_s)
        self.reports += effects.stepped
        self.core.check_integrity()
        if work is not None:
            tokens = [Sampled(7) if item.samples else None for item in work.items]
            self.reports += self.core.finish_step(work, tokens, self.now_s, 0.01).stepped
            self.core.check_integrity()
        return work

    def computed(self) -> list[tuple[str, int, int]]:
        """Of one step, by name."""
        work = self.step()
        assert work is not None
        return sorted((one.sequence.ref.request_id, one.first_token, one.end_token) for one in work.items)

    def end_load(self, *, done: int = STORED, failed: bool = False) -> None:
        ((loads, ended),) = self.mover.loads
        self.mover.loads = []
        self.mover.load(loads[:done])
        ended(Loaded(done, failed=failed))

    def start(self, one: SequenceRef, prompt: list[int], *, seq: int, max_tokens: int = 32) -> None:
        source = spec(one, prompt, max_tokens=max_tokens)
        self.send(plan(seq, starts=(source,), prefills=(prefill(one, 0, len(prompt)),)))


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def busy(bench: Bench) -> Bench:
    """`a` decodes, and `b` waits for its blocks."""
    bench.start(A, [50, 51], seq=1)
    assert bench.computed() == [("a", 0, 2)]
    chunks = (prefill(B, 0, len(KNOWN)),)
    bench.send(plan(2, steps=4, starts=(spec(B, KNOWN),), prefills=chunks, decodes=(decode(A, 2),)))
    assert bench.computed() == [("a", 2, 3)]
    return bench


def test_others_go_on_while_one_waits_and_it_computes_the_rest_in_the_next_step(busy: Bench) -> None:
    assert busy.computed() == [("a", 3, 4)]
    busy.end_load()
    assert busy.computed() == [("a", 4, 5), ("b", 12, 14)]
    assert [hit.blocks for report in busy.reports for hit in report.hits] == [(0, 0, 0), (0, 3, 0)]
    held = busy.table.find(B)
    assert held is not None and held.state is SequenceState.DECODING and held.cached_tokens == 12


def test_decodes_of_one_that_waits_are_passed_over_and_told_with_the_end_of_their_plan(busy: Bench) -> None:
    busy.send(plan(3, steps=3, decodes=(decode(A, 3), decode(B, 4))))
    for _ in range(4):
        assert [one for one, _, _ in busy.computed()] == ["a"]
    busy.end_load()
    assert [one for one, _, _ in busy.computed()] == ["a", "b"]
    assert [one for one, _, _ in busy.computed()] == ["a", "b"]
    assert busy.reports[-1].plan_seq == 3 and busy.reports[-1].plan_over
    assert busy.reports[-1].passed == (PassedOver(ref=B, steps=2),)
    assert not any(report.skipped for report in busy.reports)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_plan_of_which_all_wait_is_held_and_does_not_expire_unless_the_worker_was_frozen(
    bench: Bench, is_frozen: bool
) -> None:
    bench.start(B, KNOWN, seq=1)
    for _ in range(15):
        bench.now_s += 0.1
        assert bench.step() is None and bench.core.is_held and bench.core.has_plans
    assert [report.plan_over for report in bench.reports] == [False], "the promise, once"
    if is_frozen:
        bench.now_s += 60.0
        bench.step()
        assert StepOutcome.EXPIRED in [report.outcome for report in bench.reports]
        return
    bench.end_load()
    bench.now_s += 4.0
    assert bench.computed() == [("b", 12, 14)] and not bench.core.is_held
    assert bench.reports[-1].plan_over and bench.reports[-1].passed == ()


def test_a_later_plan_with_somebody_else_in_it_passes(bench: Bench) -> None:
    """Policies that batch prompts alone: those that decode come with the plan behind."""
    bench.start(A, [50, 51], seq=1)
    bench.step()
    bench.start(B, KNOWN, seq=2)
    assert bench.step() is None
    bench.send(plan(3, decodes=(decode(A, 2), decode(B, 4))))
    assert bench.computed() == [("a", 2, 3)]
    assert [report.plan_seq for report in bench.reports if report.plan_over] == [1, 2, 3]


@pytest.mark.parametrize(("done", "failed"), [(0, True), (2, True), (1, False), (0, False)])
def test_a_load_that_missed_is_computed_and_not_tried_again(busy: Bench, done: int, failed: bool) -> None:
    busy.end_load(done=done, failed=failed)
    assert busy.computed() == [("a", 3, 4), ("b", done * BLOCK_TOKENS, 14)]
    assert not busy.mover.loads


def test_one_that_waits_too_long_computes_and_its_load_still_loses_nothing(busy: Bench) -> None:
    for _ in range(3):
        busy.step()
    busy.now_s += 2.1
    assert busy.computed() == [("b", 0, 14)]
    free = busy.cache.free_blocks
    busy.end_load()
    busy.core.check_integrity()
    assert busy.cache.free_blocks == free + STORED, "the names are there already"


def test_whoever_goes_while_blocks_are_on_the_way_leaves_them_to_the_cache(busy: Bench) -> None:
    busy.table.cancel(B, FinishReason.CANCELLED, 0.0)
    busy.core.check_integrity()
    busy.end_load()
    busy.core.check_integrity()
    assert busy.cache.evictable_blocks == STORED


def test_who_asks_anew_is_told_how_far_it_is_and_nothing_more_is_computed_for_plans_before(
    busy: Bench,
) -> None:
    snapshot = busy.core.on_snapshot(TakeSnapshot(epoch=1), 0.0)
    (listed,) = [one for one in snapshot.sequences if one.ref == B]
    assert (listed.state, listed.computed_tokens, listed.allocated_blocks) == ("prefilling", 0, STORED)
    busy.end_load()
    assert busy.step() is None
    busy.send(plan(1, prefills=(prefill(B, 0, 14),)))
    assert busy.computed() == [("b", 12, 14)]


def test_who_asks_anew_while_one_waits_for_its_turn_finds_nobody_put_off(busy: Bench) -> None:
    """Its blocks are there, and the step had no room for it: it was put off for nothing from then on."""
    busy.end_load()
    assert busy.core._table.resume(busy.now_s, most_tokens=0) == []
    assert list(busy.core.put_off) == [B.key]
    busy.core.check_integrity()
    busy.core.on_snapshot(TakeSnapshot(epoch=1), 0.0)
    busy.core.check_integrity()
    assert not busy.core.put_off


def test_a_preempted_one_says_that_its_first_token_did_not_come(busy: Bench) -> None:
    busy.send(plan(3, supersedes=True, preempt=(B,), decodes=(decode(A, 2),)))
    busy.step()
    (short,) = [short for report in busy.reports for short in report.shorts]
    assert (short.ref, short.missing_tokens) == (B, 1)
    busy.end_load()
    busy.core.check_integrity()
