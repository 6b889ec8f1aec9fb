"""A worker's core against any plans: a random scheduler, and a pretended engine that checks every slot."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.core.plans import WorkItem
from services.worker.core.sampling import Sampled
from services.worker.core.steps import StepCore, StepEffects
from shared.errors import ForeignSequence, StaleEpoch
from shared.messages.commands import TakeSnapshot
from shared.messages.plans import BatchPlan, SkipReason, WorkerStepped
from shared.messages.reports import SequenceState, WorkerReported
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.tokens import ExtendSequence, FetchTokens, TokenDelta
from tests.services.worker.builders import core_of
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

BLOCKS = 12


def next_token(tokens: list[int]) -> int:
    """What the pretended model says: it depends on every token before."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 7) % 9973
    return state % 90


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Bench:
    """A core, a pretended engine whose KV is the tokens themselves, and everything that was sent."""

    core: StepCore = field(default_factory=lambda: core_of(BLOCKS))
    now_s: float = 0.0
    kv: dict[int, int] = field(default_factory=dict)
    stepped: list[WorkerStepped] = field(default_factory=list)
    answers: dict[SequenceRef, list[int]] = field(default_factory=dict)
    ends: dict[SequenceRef, FinishReason] = field(default_factory=dict)

    def take(self, effects: StepEffects) -> None:
        self.stepped += effects.stepped
        for addressed in effects.frames:
            for delta in addressed.frame.deltas:
                self.take_delta(delta)
        self.core.check_integrity()
        assert [report.seq for report in self.stepped] == list(range(1, len(self.stepped) + 1))

    def take_delta(self, delta: TokenDelta) -> None:
        sequence = ref(delta.request_id, delta.attempt, delta.choice)
        answer = self.answers.setdefault(sequence, [])
        assert delta.first_index == len(answer), "a gap or a repetition"
        assert sequence not in self.ends, "a delta after the end"
        answer += delta.tokens
        if delta.finish_reason is not None:
            self.ends[sequence] = delta.finish_reason

    def send(self, batch: BatchPlan) -> None:
        self.take(self.core.on_plan(batch, self.now_s))

    def start(self, prompt: list[int], *, steps: int = 9, max_tokens: int = 32) -> None:
        """One plan that prefills a sequence and decodes it."""
        source, chunk = spec(ref(), prompt, max_tokens=max_tokens), prefill(ref(), 0, len(prompt))
        self.send(plan(1, steps=steps, starts=(source,), prefills=(chunk,), decodes=(decode(ref(), 4),)))

    def step(self) -> bool:
        """One iteration; False when there was nothing to compute."""
        work, effects = self.core.begin_step(self.now_s)
        self.take(effects)
        if work is None:
            return False
        tokens = [self.compute(item) for item in work.items]
        self.now_s += 0.01
        self.take(self.core.finish_step(work, tokens, self.now_s, step_s=0.01))
        return True

    def run(self) -> None:
        while self.step():
            pass

    def compute(self, item: WorkItem) -> Sampled | None:
        sequence = item.sequence
        slots = [block * BLOCK_TOKENS + offset for block in sequence.blocks for offset in range(BLOCK_TOKENS)]
        for position in range(item.first_token, item.end_token):
            self.kv[slots[position]] = sequence.tokens[position]
        seen = [self.kv[slots[position]] for position in range(item.end_token)]
        assert seen == sequence.tokens[: item.end_token], "the KV is another sequence's"
        return Sampled(next_token(seen)) if item.samples else None

    def report(self) -> WorkerReported:
        return self.core.report(self.now_s)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_plan_is_over_when_nothing_of_it_is_left(bench: Bench) -> None:
    bench.start([1, 2], max_tokens=2)
    bench.run()
    assert bench.ends == {ref(): FinishReason.LENGTH}
    assert [(r.steps_done, r.plan_over, len(r.ended), r.skipped) for r in bench.stepped] == [
        (1, False, 0, ()),
        (2, False, 1, ()),
        (2, True, 0, ()),
    ]


def test_a_skip_is_reported_once_per_plan(bench: Bench) -> None:
    chunks = prefill(ref(), 0, 3), prefill(ref("other"), 0, 3)
    decodes = decode(ref(), 1), decode(ref("third"), 1)
    bench.send(plan(1, steps=4, starts=(spec(ref(), [1, 2, 3]),), prefills=chunks, decodes=decodes))
    bench.run()
    skips = [(item.ref.request_id, item.reason) for report in bench.stepped for item in report.skipped]
    unknown = SkipReason.UNKNOWN
    assert skips == [("other", unknown), ("third", unknown), ("r", SkipReason.EXHAUSTED)]
    assert bench.stepped[-1].plan_over and len(bench.answers[ref()]) == 2


def test_a_rehearsal_is_computed_and_nobody_but_the_scheduler_hears_of_it(bench: Bench) -> None:
    quiet = spec(ref("r~1"), [1, 2, 3, 4, 5], max_tokens=1, rehearsal=True)
    bench.send(plan(1, starts=(quiet,), prefills=(prefill(ref("r~1"), 0, 3),)))
    assert bench.step()
    (listed,) = bench.report().sequences
    assert (listed.ref, listed.gateway_id) == (ref("r~1"), ""), "no gateway takes it for its own"
    bench.send(plan(2, prefills=(prefill(ref("r~1"), 3, 5),)))
    bench.run()
    assert bench.answers == {}
    assert [end.ref for report in bench.stepped for end in report.ended] == [ref("r~1")]
    assert bench.report().sequences == () and bench.report().capacity.free_blocks == BLOCKS


def test_a_cancel_between_the_steps_frees_blocks_before_the_next(bench: Bench) -> None:
    bench.start([1, 2])
    bench.step()
    bench.step()
    bench.core.on_cancel(cancelling(ref()), bench.now_s)
    assert bench.report().capacity.free_blocks == BLOCKS
    assert not bench.step()
    last = bench.stepped[-1]
    assert (last.plan_over, last.skipped, last.free_blocks) == (True, (), BLOCKS)
    assert [(ended.ref, ended.finish_reason) for ended in last.ended] == [(ref(), FinishReason.CANCELLED)]
    assert bench.ends == {}


def test_a_snapshot_gives_up_plans_and_numbers_go_on(bench: Bench) -> None:
    bench.start([1, 2])
    bench.step()
    report = bench.core.on_snapshot(TakeSnapshot(epoch=7), bench.now_s)
    assert (report.epoch, report.plan_seq, report.stepped_seq) == (7, 0, 1)
    assert not bench.step() and not bench.core.has_plans
    with pytest.raises(StaleEpoch):
        bench.core.on_snapshot(TakeSnapshot(epoch=6), bench.now_s)
    bench.send(plan(1, epoch=7, decodes=(decode(ref(), 4),)))
    bench.run()
    assert bench.answers[ref()] == continuation([1, 2], 2)


def test_an_end_at_the_start_is_told_to_gateway_and_scheduler(bench: Bench) -> None:
    bench.send(plan(1, starts=(spec(ref(), [200]),), prefills=(prefill(ref(), 0, 1),)))
    bench.run()
    assert bench.ends == {ref(): FinishReason.ERROR}
    assert bench.stepped[-1].ended[0].ref == ref() and bench.stepped[-1].skipped == ()


NAMES = ("a", "b", "c", "d", "e")


KINDS = "plan plan plan step step cancel ack snapshot wait restart".split()
SCRIPTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.integers(0, 9), st.integers(0, 9)),
    max_size=60,
)
Script = list[tuple[str, str, int, int]]


class RandomScheduler:
    """Plans by the last report, sometimes wrongly: drawn numbers shift chunks and allocations."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.seq = 0
        self.epoch = 1
        self.attempts = dict.fromkeys(NAMES, 1)

    def prompt(self, name: str) -> list[int]:
        return [NAMES.index(name) + 1] * (3 + 4 * NAMES.index(name))

    def plan(self, name: str, first: int, second: int) -> BatchPlan:
        self.seq += 1
        sequence = ref(name, self.attempts[name])
        reports = {report.ref: report for report in self.bench.report().sequences}
        prefills, decodes = [], []
        for held in reports.values():
            total = held.prompt_tokens + held.generated_tokens
            if held.state is SequenceState.DECODING:
                decodes.append(decode(held.ref, -(-(total + first) // BLOCK_TOKENS)))
            elif held.state is not SequenceState.ENDED:
                end = min(total, held.computed_tokens + 1 + second)
                prefills.append(prefill(held.ref, held.computed_tokens + (first == 9), end))
        return plan(
            self.seq,
            epoch=self.epoch,
            steps=1 + second % 3,
            supersedes=first == 8,
            starts=(spec(sequence, self.prompt(name), max_tokens=4 + first),),
            preempt=(sequence,) if first == 7 and sequence in reports else (),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
        )

    def apply(self, kind: str, name: str, first: int, second: int) -> None:
        bench = self.bench
        sequence = ref(name, self.attempts[name])
        if kind == "plan":
            bench.send(self.plan(name, first, second))
        elif kind == "step":
            bench.step()
        elif kind == "cancel":
            bench.core.on_cancel(cancelling(sequence), bench.now_s)
        elif kind == "ack":
            bench.core.on_acknowledge(acknowledging(sequence), bench.now_s)
        elif kind == "wait":
            bench.now_s += float(first)
            bench.take(bench.core.on_tick(bench.now_s))
        elif kind == "restart":
            self.attempts[name] += 1
        else:
            self.epoch += second % 2
            self.seq = 0
            report = bench.core.on_snapshot(TakeSnapshot(epoch=self.epoch), bench.now_s)
            assert report.stepped_seq == len(bench.stepped)


Word = Callable[[Bench], None]


@st.composite
def foreign_words(draw: st.DrawFn) -> Word:
    """A command of a gateway that has submitted nothing here."""
    sequence = ref(draw(st.sampled_from(NAMES)), draw(st.sampled_from([1, 2, 1000])))
    index, kind = draw(st.integers(0, 9)), draw(st.sampled_from(["cancel", "ack", "fetch", "extend"]))

    def say(bench: Bench) -> None:
        core, sender = bench.core, "gateway-1"
        with suppress(ForeignSequence):
            match kind:
                case "cancel":
                    core.on_cancel(cancelling(sequence, sender), bench.now_s)
                case "ack":
                    core.on_acknowledge(acknowledging(sequence, sender=sender), bench.now_s)
                case "fetch":
                    question = FetchTokens(ref=sequence, sender=sender, first_index=index)
                    assert core.on_fetch(question).delta is None
                case _:
                    late = ExtendSequence(ref=sequence, sender=sender, first_index=index, tokens=(1, 2))
                    core.on_extend(late)

    return say


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(SCRIPTS)
def test_whatever_is_planned_tokens_are_right_and_blocks_conserved(script: Script) -> None:
    bench = Bench()
    scheduler = RandomScheduler(bench)
    for action in script:
        scheduler.apply(*action)
    bench.run()
    for sequence, answer in bench.answers.items():
        assert answer == continuation(scheduler.prompt(sequence.request_id), len(answer))
    for held in bench.report().sequences:
        fetched = bench.core.on_fetch(FetchTokens(ref=held.ref, sender="gateway-0", first_index=0))
        assert fetched.delta is not None
        assert list(fetched.delta.tokens) == bench.answers.get(held.ref, [])
    for name in NAMES:
        bench.core.on_cancel(cancelling(ref(name, 1000)), bench.now_s)
    assert bench.report().capacity.free_blocks == BLOCKS and bench.report().sequences == ()


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(SCRIPTS, st.lists(foreign_words(), min_size=1, max_size=6))
def test_what_another_gateway_says_in_between_changes_nothing(script: Script, words: list[Word]) -> None:
    """Of one gateway's sequences, and whatever they are doing; nor is any of it told."""
    quiet, disturbed = Bench(), Bench()
    plainly, under_noise = RandomScheduler(quiet), RandomScheduler(disturbed)
    for action in script:
        plainly.apply(*action)
        for word in words:
            word(disturbed)
        under_noise.apply(*action)
    quiet.run()
    disturbed.run()
    assert (disturbed.answers, disturbed.ends) == (quiet.answers, quiet.ends)
    assert disturbed.stepped == quiet.stepped and disturbed.report() == quiet.report()


def test_a_plan_says_which_steps_it_wants_reported(bench: Bench) -> None:
    bench.send(plan(1, starts=(spec(ref("a"), [1, 2], max_tokens=30),), prefills=(prefill(ref("a"), 0, 2),)))
    bench.run()
    quiet = plan(2, steps=8, decodes=(decode(ref("a"), 8),))
    bench.send(msgspec.structs.replace(quiet, report_at=3))
    bench.run()
    reports = [(report.plan_seq, report.steps_done, report.decoded_tokens) for report in bench.stepped]
    assert reports == [(1, 1, 0), (2, 3, 3), (2, 8, 5)]
    assert [report.plan_over for report in bench.stepped] == [True, False, True]
    assert len(bench.answers[ref("a")]) == 9, "every step has its frame"


def test_ends_and_skips_are_reported_in_quiet_steps_too(bench: Bench) -> None:
    short, long = spec(ref("a"), [1], max_tokens=4), spec(ref("b"), [2], max_tokens=30)
    bench.send(plan(1, starts=(short, long), prefills=(prefill(ref("a"), 0, 1), prefill(ref("b"), 0, 1))))
    bench.run()
    items = tuple(decode(ref(name), 4) for name in ("a", "b", "nobody"))
    bench.send(msgspec.structs.replace(plan(2, steps=8, decodes=items), report_at=7))
    bench.run()
    reports = [report for report in bench.stepped if report.plan_seq == 2]
    assert [report.steps_done for report in reports] == [1, 3, 7, 8]
    assert [item.ref for item in reports[0].skipped] == [ref("nobody")]
    assert [end.ref for end in reports[1].ended] == [ref("a")]


def test_hidden_states_of_answers_that_go_on_are_handed_over(bench: Bench) -> None:
    """With the token that they came with counted; none of an answer that is over."""
    bench.start([5, 6, 7], max_tokens=3)
    told = []
    for index in range(3):
        work, _ = bench.core.begin_step(0.0)
        assert work is not None
        sampled = Sampled(9 + index, state=b"\x00\x3c")
        told.append(bench.core.finish_step(work, [sampled], 0.0, 0.0).observed)
    assert told[2] is None, "it is over"
    seen = [(one.states[0].generated_tokens, one.states[0].prompt_tokens) for one in told[:2] if one]
    assert seen == [(1, 3), (2, 3)]
