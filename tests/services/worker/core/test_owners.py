"""A sequence is its gateway's affair, and a scheduler's; what other gateways say of it changes nothing.

Keeps a gateway that was taken over from reading, ending or having forgotten what others have submitted: their
names stand in every heartbeat."""

import pytest

from services.worker.core.reports import Identity
from services.worker.core.sampling import Sampled
from services.worker.core.sequence import HeldSequence
from services.worker.core.sequences import SequenceTable
from services.worker.core.steps import StepCore
from services.worker.kv.core.block_pool import BlockPool
from shared.errors import ForeignSequence, InvalidRequest
from shared.messages.commands import CancelSequence
from shared.messages.plans import SkipReason
from shared.messages.reports import GatewayReported, SequenceReport, SequenceState
from shared.messages.sequence import SequenceRef, SequenceSpec, heir_digest_of
from shared.messages.tokens import ExtendSequence, FetchTokens
from tests.services.worker.builders import LIMITS
from tests.shared.messages.builders import (
    BLOCK_TOKENS,
    acknowledging,
    cancelling,
    plan,
    prefill,
    ref,
    spec,
)

PROMPT = [1, 2, 3]
OTHER = "gateway-1"


class Desk:
    """A worker's core that has taken up some plans."""

    def __init__(self) -> None:
        identity = Identity("worker-0", 1, "model", 64, "host")
        self.core = StepCore(identity, SequenceTable(BlockPool(32, BLOCK_TOKENS), LIMITS))
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

    def tokens(self, name: SequenceRef, sender: str = "gateway-0") -> tuple[int, ...] | None:
        question = FetchTokens(ref=name, sender=sender, first_index=0)
        delta = self.core.on_fetch(question).delta
        return None if delta is None else delta.tokens


@pytest.mark.parametrize(
    ("sender", "whether"),
    [
        ("gateway-0", True),
        ("scheduler-0", True),
        ("scheduler-spare", True),
        ("gateway-1", False),
        ("gateway-00", False),
        ("worker-0", False),
        ("placement-0", False),
        ("scheduler", False),
        ("schedulers-0", False),
        ("x", False),
    ],
)
def test_who_may_ask_for_a_sequence_of_the_first_gateway(sender: str, whether: bool) -> None:
    assert HeldSequence.from_spec(spec(ref(), PROMPT), 64, 0.0).may_be_used_by(sender) is whether


@pytest.mark.parametrize("is_over", [False, True])
def test_nothing_that_another_gateway_says_is_obeyed(is_over: bool) -> None:
    """Neither of one that runs nor of one that has ended and waits to be acknowledged."""
    desk = Desk()
    desk.start(spec(ref(), PROMPT, max_tokens=1 if is_over else 9))
    before = desk.held()
    assert (before["r"].state is SequenceState.ENDED) is is_over
    late = ExtendSequence(ref=ref(), sender=OTHER, first_index=1, tokens=(9,))
    for attempt in (1, 2, 1000):
        with pytest.raises(ForeignSequence, match="only the gateway that submitted it"):
            desk.core.on_cancel(cancelling(ref(attempt=attempt), OTHER), 0.0)
        with pytest.raises(ForeignSequence):
            desk.tokens(ref(attempt=attempt), OTHER)
    with pytest.raises(ForeignSequence):
        desk.core.on_acknowledge(acknowledging(ref(), sender=OTHER), 0.0)
    with pytest.raises(ForeignSequence):
        desk.core.on_extend(late)
    desk.core.check_integrity()
    assert desk.held() == before and desk.tokens(ref()) == (7,)


def test_a_gateway_s_word_counts_for_its_own_and_a_scheduler_s_for_all() -> None:
    desk = Desk()
    desk.start(spec(ref("a"), PROMPT), spec(ref("b"), PROMPT, gateway_id=OTHER), spec(ref("c"), PROMPT))
    assert (
        desk.tokens(ref("a")) == desk.tokens(ref("a"), "scheduler-0") == desk.tokens(ref("b"), OTHER) == (7,)
    )
    desk.core.on_cancel(cancelling(ref("a")), 0.0)
    desk.core.on_cancel(CancelSequence(ref=ref("b"), sender="scheduler-0", gateway_id=OTHER), 0.0)
    desk.core.on_cancel(cancelling(ref("c"), "scheduler-0"), 0.0)
    assert desk.held() == {}


def test_of_ends_that_are_acknowledged_together_the_own_ones_are_forgotten() -> None:
    desk = Desk()
    desk.start(
        spec(ref("a"), PROMPT, max_tokens=1),
        spec(ref("b"), PROMPT, max_tokens=1, gateway_id=OTHER),
        spec(ref("c"), PROMPT, max_tokens=1),
    )
    with pytest.raises(ForeignSequence, match="b/0#1"):
        desk.core.on_acknowledge(acknowledging(ref("a"), ref("b"), ref("c")), 0.0)
    assert set(desk.held()) == {"b"}


@pytest.mark.parametrize(
    "cancel", [cancelling(ref()), CancelSequence(ref=ref(), sender="scheduler-0", gateway_id="gateway-0")]
)
def test_a_cancel_before_the_start_holds_for_its_gateway_alone(cancel: CancelSequence) -> None:
    """Keeps a gateway from stopping another's sequence whose name it knew before its worker did."""
    desk = Desk()
    desk.core.on_cancel(cancel, 0.0)
    assert desk.start(spec(ref(), PROMPT))[0] == (ref(), SkipReason.UNKNOWN)
    assert desk.start(spec(ref(), PROMPT, gateway_id=OTHER)) == []
    assert desk.tokens(ref(), OTHER) == (7,)


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_start_under_a_name_that_another_s_has_is_skipped(attempt: int, max_tokens: int) -> None:
    desk = Desk()
    desk.start(spec(ref(), PROMPT, max_tokens=max_tokens))
    skipped = desk.start(spec(ref(attempt=attempt), [5, 5], gateway_id=OTHER))
    assert (ref(attempt=attempt), SkipReason.UNKNOWN) in skipped
    assert desk.held()["r"].gateway_id == "gateway-0" and desk.tokens(ref()) == (7,)


def test_tokens_that_another_gateway_sends_ahead_of_a_start_are_not_joined() -> None:
    """Keeps a gateway from writing into the answer of a sequence that is about to change workers."""
    desk = Desk()
    desk.core.on_extend(ExtendSequence(ref=ref(), sender=OTHER, first_index=0, tokens=(66, 67)))
    desk.core.on_extend(ExtendSequence(ref=ref(), sender="gateway-0", first_index=0, tokens=(10, 11)))
    desk.start(spec(ref(), PROMPT, open_tokens=2))
    assert desk.tokens(ref()) == (10, 11, 7)
    desk.core.on_extend(ExtendSequence(ref=ref("s"), sender=OTHER, first_index=0, tokens=(66, 67)))
    desk.start(spec(ref("s"), PROMPT, open_tokens=2))
    assert 66 not in (desk.tokens(ref("s")) or ())


def test_late_tokens_that_the_model_has_not_are_refused_before_they_are_joined() -> None:
    """Keeps one from failing the step of all that run beside it."""
    desk = Desk()
    with pytest.raises(InvalidRequest, match="outside the model's vocabulary"):
        desk.core.on_extend(
            ExtendSequence(ref=ref(), sender="gateway-0", first_index=0, tokens=(10, LIMITS.vocabulary))
        )
    desk.start(spec(ref(), PROMPT, open_tokens=2))
    assert 10 not in (desk.tokens(ref()) or ())


def test_an_heir_reads_and_ends_what_it_takes_over() -> None:
    """Who shows the key that its gateway gave away; nobody else, and nothing that has no heir."""
    desk, key = Desk(), b"key of the heir"
    desk.start(spec(ref("a"), PROMPT, heir_digest=heir_digest_of(key)), spec(ref("b"), PROMPT))
    assert desk.held()["a"].heir_of == 1 and desk.held()["b"].heir_of == 0
    for name, shown in (("a", b""), ("a", b"another"), ("b", key), ("b", b"")):
        with pytest.raises(ForeignSequence):
            desk.core.on_fetch(FetchTokens(ref=ref(name), sender=OTHER, first_index=0, heir_key=shown))
        with pytest.raises(ForeignSequence):
            desk.core.on_cancel(CancelSequence(ref=ref(name), sender=OTHER, heir_key=shown), 0.0)
    answer = desk.core.on_fetch(FetchTokens(ref=ref("a"), sender=OTHER, first_index=0, heir_key=key)).delta
    assert answer is not None and answer.tokens == (7,)
    desk.core.on_cancel(CancelSequence(ref=ref("a"), sender=OTHER, heir_key=key), 0.0)
    assert set(desk.held()) == {"b"}


def test_what_has_an_heir_waits_for_it_when_its_gateway_starts_anew() -> None:
    desk = Desk()
    desk.start(spec(ref("a"), PROMPT, heir_digest=heir_digest_of(b"key")), spec(ref("b"), PROMPT))
    desk.core.on_gateway(GatewayReported(gateway_id="gateway-0", incarnation=2), 1.0)
    assert set(desk.held()) == {"a"} and desk.held()["a"].state is SequenceState.DECODING
    desk.core.on_tick(1.0 + LIMITS.gateway_timeout_s - 0.1)
    assert set(desk.held()) == {"a"}
    desk.core.on_gateway(
        GatewayReported(gateway_id="gateway-0", incarnation=2), 1.0 + LIMITS.gateway_timeout_s
    )
    desk.core.on_tick(1.1 + LIMITS.gateway_timeout_s)
    assert not desk.held()
    desk.core.check_integrity()
