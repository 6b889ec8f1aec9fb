"""By which rules the items of a plan apply, a sequence moves and tells of itself, and late tokens join it.

A sequence is its gateway's affair, and a scheduler's. Keeps a gateway that was taken over from reading,
ending or having forgotten what others have submitted: their names stand in every heartbeat."""

from typing import Any

import msgspec
import pytest

from services.worker.core.late_tokens import MOST_SEQUENCES, MOST_TOKENS, Latecomers
from services.worker.core.plans import PutOff, WorkItem
from services.worker.core.sampling import FAILED, KV_LOST, Sampled
from services.worker.core.sequence import HeldSequence
from services.worker.core.sequences import SequenceTable
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool
from shared.errors import ForeignSequence, InvalidRequest
from shared.messages.commands import CancelSequence
from shared.messages.plans import Decode, PrefillChunk, ShortStart, SkipReason
from shared.messages.reports import GatewayReported, SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceRef, SequenceSpec, heir_digest_of, pack_tokens
from shared.messages.tokens import ExtendSequence, FetchTokens
from tests.services.worker.builders import LIMITS, core_of
from tests.shared.messages.builders import (
    BLOCK_TOKENS,
    acknowledging,
    cancelling,
    decode,
    plan,
    prefill,
    ref,
    spec,
)

PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def table() -> SequenceTable:
    return SequenceTable(BlockPool(8, BLOCK_TOKENS), LIMITS)


def start(table: SequenceTable, source: SequenceSpec, now_s: float = 0.0) -> list[SkipReason]:
    skipped = table.apply_plan(plan(1, starts=(source,)), now_s)
    table.check_integrity()
    return [item.reason for item in skipped]


def run(
    table: SequenceTable, item: PrefillChunk | Decode, token: int | None = 7, now_s: float = 0.0
) -> SkipReason | PutOff | None:
    """Prepare and commit one item, sampling `token` where it samples."""
    prepared = table.prepare(item, table.find(item.ref))
    if not isinstance(prepared, WorkItem):
        return prepared
    sampled = None if token is None else Sampled(token)
    table.commit(prepared, sampled if prepared.samples or sampled == FAILED else None, now_s)
    table.check_integrity()
    return None


def state_of(table: SequenceTable, sequence: SequenceRef) -> tuple[SequenceState, int, int]:
    report = next(report for report in table.reports(0.0) if report.ref == sequence)
    return report.state, report.computed_tokens, report.generated_tokens


def test_a_prompt_is_prefilled_in_chunks_and_decoded(table: SequenceTable) -> None:
    start(table, spec(ref(), PROMPT))
    assert state_of(table, ref()) == (SequenceState.WAITING, 0, 0)
    assert run(table, prefill(ref(), 0, 4)) is None
    assert state_of(table, ref()) == (SequenceState.PREFILLING, 4, 0)
    assert run(table, prefill(ref(), 4, 6)) is None
    assert state_of(table, ref()) == (SequenceState.DECODING, 6, 1)
    assert run(table, prefill(ref(), 6, 7)) is SkipReason.MISALIGNED
    table.acknowledge([ref()], "gateway-0", 0.0)
    assert run(table, decode(ref(), 2)) is None, "it is alive, and stays"
    assert state_of(table, ref()) == (SequenceState.DECODING, 7, 2)
    assert table.pool.free_blocks == 6


@pytest.mark.parametrize(
    "item", [prefill(ref(), 1, 4), prefill(ref(), 0, 7), prefill(ref(), 0, 0), decode(ref(), 2)]
)
def test_what_does_not_fit_the_computation_is_misaligned(
    table: SequenceTable, item: PrefillChunk | Decode
) -> None:
    start(table, spec(ref(), PROMPT))
    assert run(table, item) is SkipReason.MISALIGNED
    assert table.pool.free_blocks == 8


def test_the_tokens_of_an_item_need_slots(table: SequenceTable) -> None:
    start(table, spec(ref(), PROMPT))
    assert run(table, prefill(ref(), 0, 6, blocks=9)) is SkipReason.NO_BLOCKS
    assert run(table, prefill(ref(), 0, 6, blocks=1)) is SkipReason.EXHAUSTED
    assert run(table, prefill(ref(), 0, 6)) is None
    assert [run(table, decode(ref(), 2)) for _ in range(3)] == [None, None, SkipReason.EXHAUSTED]
    assert run(table, decode(ref(), 3)) is None


@pytest.mark.parametrize("sequence", [ref("other"), ref(attempt=2), ref(choice=1)])
def test_only_the_held_attempt_is_known(table: SequenceTable, sequence: SequenceRef) -> None:
    start(table, spec(ref(), PROMPT))
    assert run(table, prefill(sequence, 0, 4)) is SkipReason.UNKNOWN


def test_a_start_is_idempotent_and_a_higher_attempt_replaces(table: SequenceTable) -> None:
    start(table, spec(ref(), PROMPT))
    run(table, prefill(ref(), 0, 6))
    assert start(table, spec(ref(), PROMPT)) == []
    assert state_of(table, ref()) == (SequenceState.DECODING, 6, 1)
    assert start(table, spec(ref(attempt=2), PROMPT, generated=[7])) == []
    assert state_of(table, ref(attempt=2)) == (SequenceState.WAITING, 0, 1)
    assert table.pool.free_blocks == 8
    assert start(table, spec(ref(attempt=1), PROMPT)) == [SkipReason.UNKNOWN]


@pytest.mark.parametrize(("token", "reason"), [(9, FinishReason.STOP), (FAILED.token, FinishReason.ERROR)])
def test_an_end_frees_blocks_and_is_kept_until_acknowledged(
    table: SequenceTable, token: int, reason: FinishReason
) -> None:
    start(table, spec(ref(), PROMPT, end_token_ids=(9,)))
    run(table, prefill(ref(), 0, 6), token)
    assert [(held.ref, held.finish_reason) for held in table.take_ended()] == [(ref(), reason)]
    assert table.take_ended() == [] and table.pool.free_blocks == 8
    assert run(table, decode(ref(), 2)) is SkipReason.UNKNOWN
    table.acknowledge([ref(), ref("other")], "gateway-0", 1.0)
    assert table.reports(1.0) == ()
    assert start(table, spec(ref(), PROMPT)) == [SkipReason.UNKNOWN]


@pytest.mark.parametrize(
    ("failure", "reason"), [(FAILED, FinishReason.ERROR), (KV_LOST, FinishReason.KV_LOST)]
)
def test_a_chunk_that_fails_ends_its_sequence(
    table: SequenceTable, failure: Sampled, reason: FinishReason
) -> None:
    start(table, spec(ref(), PROMPT))
    prepared = table.prepare(prefill(ref(), 0, 4), table.find(ref()))
    assert isinstance(prepared, WorkItem) and not prepared.samples
    table.commit(prepared, failure, 1.0)
    table.check_integrity()
    assert [held.finish_reason for held in table.take_ended()] == [reason]


def test_an_end_nobody_acknowledges_is_forgotten_in_time(table: SequenceTable) -> None:
    start(table, spec(ref(), PROMPT, max_tokens=1))
    run(table, prefill(ref(), 0, 6), now_s=5.0)
    table.tick(65.0)
    assert len(table.reports(65.0)) == 1
    table.tick(65.5)
    assert table.reports(65.5) == ()


def wishing(**wish: Any) -> SequenceSpec:
    source = spec(ref(), PROMPT)
    return msgspec.structs.replace(source, sampling=msgspec.structs.replace(source.sampling, **wish))


ERRORS = [spec(ref(), []), spec(ref(), [100]), spec(ref(), [1] * 64)]
ERRORS += [spec(ref(), [1], generated=[4_000_000_000])]
ERRORS += [spec(ref(), PROMPT, adapter="a")]
ERRORS += [wishing(forced=pack_tokens([5, 100])), wishing(logit_bias=((5, 1.0), (100, 1.0)))]
ERRORS += [wishing(allowed_token_ids=(5, 100)), wishing(bad_words=((5,), (5, 100)))]
OVER = [
    *((source, FinishReason.ERROR) for source in ERRORS),
    (spec(ref(), [1], generated=[2, 3], max_tokens=2), FinishReason.LENGTH),
    (spec(ref(), [1], generated=[2, 9], end_token_ids=(9,)), FinishReason.STOP),
]


@pytest.mark.parametrize(("source", "reason"), OVER)
def test_a_start_that_leaves_nothing_to_compute_ends_at_once(
    table: SequenceTable, source: SequenceSpec, reason: FinishReason
) -> None:
    """So does a wish for tokens that the model has not: it would fail the step of all that run beside it."""
    assert start(table, source) == []
    assert [held.finish_reason for held in table.take_ended()] == [reason]


def test_sequences_of_an_earlier_incarnation_of_their_gateway_go(table: SequenceTable) -> None:
    start(table, spec(ref("a"), PROMPT, gateway_incarnation=1))
    table.hear_gateway("gateway-0", 1, 0.0)
    start(table, spec(ref("b"), PROMPT, gateway_incarnation=2))
    start(table, spec(ref("c"), PROMPT, gateway_id="gateway-1"))
    table.hear_gateway("gateway-0", 2, 0.0)
    table.check_integrity()
    assert [report.ref.request_id for report in table.reports(0.0)] == ["b", "c"]
    assert start(table, spec(ref("d"), PROMPT, gateway_incarnation=1)) == [SkipReason.UNKNOWN]
    assert start(table, spec(ref("e"), PROMPT, gateway_incarnation=3)) == [], "it may be newer"
    table.hear_gateway("gateway-0", 2, 0.1)
    assert [report.ref.request_id for report in table.reports(0.1)] == ["b", "c"]


def test_a_cancelled_attempt_keeps_lower_ones_away_and_no_higher_one_for_a_while(
    table: SequenceTable,
) -> None:
    """Also one whose cancel overtakes its start."""
    for attempt in (2, 1):
        table.cancel(ref("a", attempt=attempt), FinishReason.CANCELLED, float(attempt), "gateway-0")
    for attempt in (1, 2):
        assert start(table, spec(ref("a", attempt=attempt), PROMPT)) == [SkipReason.UNKNOWN]
    assert start(table, spec(ref("a", attempt=3), PROMPT)) == []
    table.cancel(ref("a", attempt=2), FinishReason.CANCELLED, 3.0, "gateway-0")
    assert table.find(ref("a", attempt=3)) is not None
    table.cancel(ref("b"), FinishReason.CANCELLED, 3.0, "gateway-0")
    table.tick(LIMITS.end_retention_s + 3.5)
    assert start(table, spec(ref("b"), PROMPT)) == []


def test_sequences_whose_borrowed_blocks_are_lost_end_to_be_computed_again() -> None:
    pool = ExtendedPool(BlockPool(1, BLOCK_TOKENS), 1)
    pool.admit([5, 6, 9])
    table = SequenceTable(pool, LIMITS)
    for name in ("near", "far", "other"):
        start(table, spec(ref(name), PROMPT[:4] if name == "near" else PROMPT[:3]))
        run(table, prefill(ref(name), 0, 4 if name == "near" else 3))
    table.lose_blocks([5, 99], 1.0)
    table.check_integrity()
    ended = {held.ref.request_id: held.finish_reason for held in table.take_ended()}
    assert ended == {"far": FinishReason.KV_LOST}
    assert (pool.borrowed_blocks, pool.borrowed_free_blocks) == (2, 1)


def test_a_rehearsal_may_be_among_those_whose_creditor_is_lost() -> None:
    """It is forgotten with its end, while all that are held are looked through."""
    pool = ExtendedPool(BlockPool(1, BLOCK_TOKENS), 1)
    pool.admit([1, 2, 3, 4])
    core, names = core_of(pool), (ref("r~1"), ref("r"))
    starts = tuple(spec(name, PROMPT, rehearsal="~" in name.request_id) for name in names)
    core.on_plan(plan(1, starts=starts, prefills=tuple(prefill(name, 0, 6) for name in names)), 0.0)
    work, _ = core.begin_step(0.0)
    assert work is not None and len(work.items) == 2
    core.on_kv_lost([1, 2, 3, 4], 0.0)
    core.check_integrity()
    assert [one.ref.request_id for one in core.report(0.0).sequences] == ["r"]
    assert pool.borrowed_blocks == 0


def waiting(open_tokens: int) -> HeldSequence:
    """Three tokens of a prompt, and room for so many from its former worker."""
    told = msgspec.structs.replace(spec(ref("a"), [1, 2, 3]), open_tokens=open_tokens)
    return HeldSequence.from_spec(told, 64, 0.0)


def test_late_tokens_join_their_sequence_and_what_never_came_is_told_once() -> None:
    late, sequence = Latecomers(), waiting(4)
    item = Decode(ref=sequence.ref, allocated_blocks=2)
    late.add("gateway-0", sequence.ref, 0, [10, 11])
    assert late.join(sequence, item) is item
    assert sequence.tokens == [1, 2, 3, 10, 11] and sequence.open_tokens == 2
    while sequence.open_tokens:
        late.join(sequence, item)
    assert late.take_shorts() == (ShortStart(ref=sequence.ref, missing_tokens=2),)
    assert late.take_shorts() == () and sequence.tokens == [1, 2, 3, 10, 11]


def test_what_a_gateway_sends_ahead_is_bounded_and_joined_up_to_the_first_gap() -> None:
    late, sequence = Latecomers(), waiting(1000)
    item = Decode(ref=sequence.ref, allocated_blocks=99)
    late.add("gateway-0", sequence.ref, 1, [50])
    late.join(sequence, item)
    assert sequence.generated_tokens == 0, "the first is missing"
    late.add("gateway-0", sequence.ref, 0, range(2 * MOST_TOKENS))
    late.join(sequence, item)
    assert sequence.generated_tokens == MOST_TOKENS
    for number in range(2 * MOST_SEQUENCES):
        late.add("gateway-0", ref(f"r{number}"), 0, [1])
    assert len(late) == MOST_SEQUENCES


def test_who_has_waited_for_long_takes_no_more() -> None:
    late, sequence = Latecomers(), waiting(4)
    late.tick([sequence], 5.0)
    assert sequence.open_tokens == 4, "it has sampled nothing yet"
    sequence.sampled = True
    late.tick([sequence], 0.9)
    assert sequence.open_tokens == 4
    late.tick([sequence], 1.1)
    assert sequence.open_tokens == 0 and len(late.take_shorts()) == 1


ASKED = [1, 2, 3]
OTHER = "gateway-1"


class Desk:
    """A worker's core that has taken up some plans."""

    def __init__(self) -> None:
        self.core = core_of(32)
        self._seq = 0

    def start(self, *specs: SequenceSpec) -> list[tuple[SequenceRef, SkipReason]]:
        """A plan with these starts, and a step that computes their prompts; what of it was skipped."""
        self._seq += 1
        ends = {one.ref: one.prompt_tokens + one.generated_tokens + one.open_tokens for one in specs}
        chunks = tuple(prefill(name, 0, end) for name, end in ends.items())
        stepped = self.core.on_plan(plan(self._seq, starts=specs, prefills=chunks), 0.0).stepped
        work, effects = self.core.begin_step(0.0)
        stepped += effects.stepped
        if work is not None:
            stepped += self.core.finish_step(work, [Sampled(7)] * len(work.items), 0.0, 0.1).stepped
        self.core.check_integrity()
        return [(item.ref, item.reason) for event in stepped for item in event.skipped]

    def held(self) -> dict[str, SequenceReport]:
        return {one.ref.request_id: one for one in self.core.report(0.0).sequences}

    def tokens(
        self, name: SequenceRef, sender: str = "gateway-0", key: bytes = b""
    ) -> tuple[int, ...] | None:
        asked = FetchTokens(ref=name, sender=sender, first_index=0, heir_key=key)
        delta = self.core.on_fetch(asked).delta
        return None if delta is None else delta.tokens


def extending(name: SequenceRef, *tokens: int, first: int = 0, sender: str = "gateway-0") -> ExtendSequence:
    return ExtendSequence(ref=name, sender=sender, first_index=first, tokens=tokens)


def test_who_may_ask_for_a_sequence_of_the_first_gateway() -> None:
    held = HeldSequence.from_spec(spec(ref(), ASKED), 64, 0.0)
    others = "gateway-1 gateway-00 worker-0 placement-0 scheduler schedulers-0 x".split()
    assert all(map(held.may_be_used_by, ("gateway-0", "scheduler-0", "scheduler-spare")))
    assert not any(map(held.may_be_used_by, others))


def test_a_gateway_s_word_counts_for_its_own_and_a_scheduler_s_for_all() -> None:
    desk, (a, b, c) = Desk(), map(ref, "abc")
    desk.start(spec(a, ASKED), spec(b, ASKED, gateway_id=OTHER), spec(c, ASKED))
    assert desk.tokens(a) == desk.tokens(a, "scheduler-0") == desk.tokens(b, OTHER) == (7,)
    desk.core.on_cancel(cancelling(a), 0.0)
    desk.core.on_cancel(CancelSequence(ref=b, sender="scheduler-0", gateway_id=OTHER), 0.0)
    desk.core.on_cancel(cancelling(c, "scheduler-0"), 0.0)
    assert desk.held() == {}


def test_of_ends_that_are_acknowledged_together_the_own_ones_are_forgotten() -> None:
    desk, owners = Desk(), {"a": "gateway-0", "b": OTHER, "c": "gateway-0"}
    desk.start(*(spec(ref(name), ASKED, max_tokens=1, gateway_id=owner) for name, owner in owners.items()))
    with pytest.raises(ForeignSequence, match="b/0#1"):
        desk.core.on_acknowledge(acknowledging(*map(ref, owners)), 0.0)
    assert set(desk.held()) == {"b"}


@pytest.mark.parametrize(
    "cancel", [cancelling(ref()), CancelSequence(ref=ref(), sender="scheduler-0", gateway_id="gateway-0")]
)
def test_a_cancel_before_the_start_holds_for_its_gateway_alone(cancel: CancelSequence) -> None:
    """Keeps a gateway from stopping another's sequence whose name it knew before its worker did."""
    desk = Desk()
    desk.core.on_cancel(cancel, 0.0)
    assert desk.start(spec(ref(), ASKED))[0] == (ref(), SkipReason.UNKNOWN)
    assert desk.start(spec(ref(), ASKED, gateway_id=OTHER)) == []
    assert desk.tokens(ref(), OTHER) == (7,)


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_start_under_a_name_that_another_s_has_is_skipped(attempt: int, max_tokens: int) -> None:
    desk = Desk()
    desk.start(spec(ref(), ASKED, max_tokens=max_tokens))
    skipped = desk.start(spec(ref(attempt=attempt), [5, 5], gateway_id=OTHER))
    assert (ref(attempt=attempt), SkipReason.UNKNOWN) in skipped
    assert desk.held()["r"].gateway_id == "gateway-0" and desk.tokens(ref()) == (7,)


def test_tokens_that_another_gateway_sends_ahead_of_a_start_are_not_joined() -> None:
    """Keeps a gateway from writing into the answer of a sequence that is about to change workers."""
    desk = Desk()
    desk.core.on_extend(extending(ref(), 66, 67, sender=OTHER))
    desk.core.on_extend(extending(ref(), 10, 11))
    desk.core.on_extend(extending(ref("s"), 66, 67, sender=OTHER))
    for name in (ref(), ref("s")):
        desk.start(spec(name, ASKED, open_tokens=2))
    assert desk.tokens(ref()) == (10, 11, 7) and 66 not in (desk.tokens(ref("s")) or ())


def test_late_tokens_that_the_model_has_not_are_refused_before_they_are_joined() -> None:
    """Keeps one from failing the step of all that run beside it."""
    desk = Desk()
    with pytest.raises(InvalidRequest, match="outside the model's vocabulary"):
        desk.core.on_extend(extending(ref(), 10, LIMITS.vocabulary))
    desk.start(spec(ref(), ASKED, open_tokens=2))
    assert 10 not in (desk.tokens(ref()) or ())


def test_an_heir_reads_and_ends_what_it_takes_over() -> None:
    """Who shows the key that its gateway gave away; nobody else, and nothing that has no heir."""
    desk, key = Desk(), b"key of the heir"
    desk.start(spec(ref("a"), ASKED, heir_digest=heir_digest_of(key)), spec(ref("b"), ASKED))
    assert desk.held()["a"].heir_of == 1 and desk.held()["b"].heir_of == 0
    for name, shown in (("a", b""), ("a", b"another"), ("b", key), ("b", b"")):
        with pytest.raises(ForeignSequence):
            desk.tokens(ref(name), OTHER, shown)
        with pytest.raises(ForeignSequence):
            desk.core.on_cancel(CancelSequence(ref=ref(name), sender=OTHER, heir_key=shown), 0.0)
    assert desk.tokens(ref("a"), OTHER, key) == (7,)
    desk.core.on_cancel(CancelSequence(ref=ref("a"), sender=OTHER, heir_key=key), 0.0)
    assert set(desk.held()) == {"b"}


def test_what_has_an_heir_waits_for_it_when_its_gateway_starts_anew() -> None:
    desk, anew = Desk(), GatewayReported(gateway_id="gateway-0", incarnation=2)
    desk.start(spec(ref("a"), ASKED, heir_digest=heir_digest_of(b"key")), spec(ref("b"), ASKED))
    desk.core.on_gateway(anew, 1.0)
    desk.core.on_tick(0.9 + LIMITS.gateway_timeout_s)
    assert set(desk.held()) == {"a"} and desk.held()["a"].state is SequenceState.DECODING
    desk.core.on_gateway(anew, 1.0 + LIMITS.gateway_timeout_s)
    desk.core.on_tick(1.1 + LIMITS.gateway_timeout_s)
    assert not desk.held()
    desk.core.check_integrity()
