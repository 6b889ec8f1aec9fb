"""What gateways ask for: idempotent, bounded, refused with types, ended when nobody reads."""

from typing import Any

import msgspec
import pytest

from services.scheduler.core.effects import NoteForeign
from services.scheduler.core.intake import Intake
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Phase, Sequence
from shared.errors import (
    ContextOverflow,
    ForeignSequence,
    InternalError,
    InvalidRequest,
    KvasirError,
    MessageTooLarge,
    Overloaded,
    RoleMissing,
    UnavailableError,
    UnknownModel,
)
from shared.liveness import SILENCE_S
from shared.messages.moves import WorkerRoles
from shared.messages.reports import GatewayReported
from shared.messages.sequence import SequenceSpec
from tests.services.scheduler.world import SMALL, small_world, started
from tests.shared.messages.builders import cancelling, ref, spec, worker_report


def submitted(
    name: str = "a", *, attempt: int = 1, prompt_tokens: int = 4, generated: int = 0, **fields: Any
) -> SequenceSpec:
    told = {"generated": [1] * generated, "max_tokens": 5, **fields}
    return spec(ref(name, attempt), [7] * prompt_tokens, **told)


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (submitted(prompt_tokens=0), InvalidRequest),
        (submitted(generated=5), InvalidRequest),
        (submitted(prompt_tokens=1000), MessageTooLarge),
    ],
)
def test_what_cannot_work_is_refused(refused: SequenceSpec, error: type[KvasirError]) -> None:
    roster = Roster(Rules(max_start_bytes=3999))
    with pytest.raises(error):
        Intake(roster).on_submit(refused, 0.0)
    assert roster.sequences == {}


def test_an_adapter_that_no_worker_has_is_unknown_unless_there_is_no_worker() -> None:
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_submit(submitted("early", adapter="a"), 0.0)
    roster.welcome(worker_report(adapters=("b",)), 1, 0.0)
    intake.on_submit(submitted("known", adapter="b"), 0.0)
    with pytest.raises(UnknownModel, match="no worker of '' has adapter 'a'"):
        intake.on_submit(submitted("late", adapter="a"), 0.0)


def test_what_is_over_is_known_and_a_higher_attempt_begins() -> None:
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_cancel(cancelling(ref("cancelled", 2)), 0.0)
    roster.ended.put(("ended", 0), (2, "worker-0"), 0.0)
    for name in ("cancelled", "ended"):
        for attempt, is_over in ((1, True), (2, True), (3, False)):
            admission, effects = intake.on_submit(submitted(name, attempt=attempt), 1.0)
            assert admission.known is is_over and bool(effects) is not is_over
            assert ((name, 0) in roster.sequences) is not is_over


def test_what_was_given_up_is_refused_again_and_what_fits_nowhere_at_any_attempt() -> None:
    roster = Roster(Rules())
    errors = {"a": InternalError("because"), "long": ContextOverflow("too long")}
    for name, error in errors.items():
        roster.dropped.put(("gateway-0", (name, 0)), (2, error), 0.0)
    for name, attempt in (("a", 2), ("long", 2), ("long", 3)):
        with pytest.raises(type(errors[name])):
            Intake(roster).on_submit(submitted(name, attempt=attempt), 1.0)
    assert not Intake(roster).on_submit(submitted("a", attempt=3), 1.0)[0].known
    assert list(roster.sequences) == [("a", 0)]


def test_without_a_role_what_is_new_is_refused_as_long_as_placement_says_so() -> None:
    roster = Roster(Rules())
    intake = Intake(roster)
    for name in ("worker-0", "worker-1"):
        roster.welcome(worker_report(name), 1, 0.0)
    told = WorkerRoles(
        roles={"worker-0": "prefill", "worker-1": "prefill"}, shortage="no worker may write answers"
    )
    roster.roles, roster.roles_told_s = told, 1.0
    with pytest.raises(RoleMissing, match="write answers"):
        intake.on_submit(submitted("a"), 2.0)
    intake.on_submit(submitted("b", attempt=2), 2.0)
    intake.on_submit(submitted("c"), 9.0)
    roster.roles, roster.roles_told_s = WorkerRoles(), 9.5
    intake.on_submit(submitted("d"), 9.6)


@pytest.mark.parametrize("roles", [{}, {"worker-0": "prefill"}, {"worker-0": "decode", "worker-1": "both"}])
def test_a_shortage_that_is_not_true_of_the_workers_here_refuses_nothing(roles: dict[str, str]) -> None:
    roster = Roster(Rules())
    for name in ("worker-0", "worker-1"):
        roster.welcome(worker_report(name), 1, 0.0)
    roster.roles, roster.roles_told_s = WorkerRoles(roles=roles, shortage="noise"), 1.0
    Intake(roster).on_submit(submitted("a"), 1.1)


def test_the_queue_is_bounded_and_resumed_sequences_have_room_of_their_own() -> None:
    intake = Intake(Roster(Rules(max_queued=2)))
    for name in ("a", "b"):
        intake.on_submit(submitted(name), 0.0)
    with pytest.raises(Overloaded) as refused:
        intake.on_submit(submitted("c"), 0.0)
    assert (refused.value.retry_after_s or 0.0) >= 1.0
    for name in ("d", "e"):
        intake.on_submit(submitted(name, attempt=2), 0.0)
    with pytest.raises(Overloaded):
        intake.on_submit(submitted("f", attempt=2), 0.0)
    assert intake.on_submit(submitted("a"), 0.0)[0].known, "what waits already is never refused"


def test_an_earlier_incarnation_of_a_gateway_is_not_listened_to() -> None:
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_submit(submitted("a", gateway_incarnation=1), 0.0)
    intake.on_submit(submitted("b", gateway_incarnation=2), 0.0)
    assert list(roster.sequences) == [("b", 0)]
    with pytest.raises(UnavailableError) as refused:
        intake.on_submit(submitted("c", gateway_incarnation=1), 0.0)
    assert refused.value.retry_after_s == SILENCE_S, "the gateway asks again, and its client gets no 400"


def test_a_gateway_that_starts_again_is_served_whatever_its_number() -> None:
    """Keeps a clock that was set back from shutting a gateway out."""
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_submit(submitted("a", gateway_incarnation=2**60), 0.0)
    assert not intake.on_submit(submitted("b", gateway_incarnation=3), 0.1)[0].known
    assert list(roster.sequences) == [("b", 0)], "nobody reads what the start before asked for"


def test_a_gateway_that_was_replaced_comes_back_when_its_successor_is_gone() -> None:
    intake = Intake(Roster(Rules()))
    intake.on_submit(submitted("a", gateway_incarnation=1), 0.0)
    intake.on_submit(submitted("b", gateway_incarnation=2), 0.0)
    assert not intake.on_submit(submitted("c", gateway_incarnation=1), SILENCE_S + 0.1)[0].known


def test_what_waited_for_a_gateway_is_not_cancelled_by_a_late_word_of_its_start_before() -> None:
    """The scheduler took over after the gateway had started anew; the word was under way in a partition."""
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_submit(submitted("a", gateway_incarnation=2), 0.0)
    intake.on_submit(submitted("b", gateway_incarnation=1), 1.0)
    assert not intake.on_submit(submitted("a", gateway_incarnation=2), 1.0 + SILENCE_S + 0.1)[0].known
    assert list(roster.sequences) == [("a", 0)]


def test_a_silent_gateway_loses_what_waits_and_may_come_back() -> None:
    roster = Roster(Rules(gateway_timeout_s=10.0))
    intake = Intake(roster)
    intake.on_submit(submitted(), 0.0)
    intake.on_gateway_reported(GatewayReported(gateway_id="gateway-0", incarnation=1), 5.0)
    intake.on_tick(14.0)
    assert len(roster.sequences) == 1
    intake.on_tick(15.1)
    assert len(roster.sequences) == 0
    assert not intake.on_submit(submitted(), 16.0)[0].known, "it was only frozen"


def test_what_a_worker_holds_for_a_silent_gateway_is_left_to_the_worker() -> None:
    world = small_world(workers=1, rules=Rules(settings=SMALL.settings, round_s=0.3, gateway_timeout_s=0.45))
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=60, max_tokens=60)
    world.until(lambda: request.over, limit_s=4.0)
    assert request.tokens == request.expected


def test_submissions_are_idempotent_and_a_higher_attempt_replaces() -> None:
    world, request = started(answer_tokens=40)
    core = world.core
    again = world.gateway.spec(request.key, request.attempt)
    admission, effects = core.on_submit(again, world.now_s)
    assert admission.known and admission.worker_id == "worker-0" and effects == []
    world.hand_over(request)
    world.until(lambda: request.over, limit_s=5.0)
    assert request.tokens == request.expected and "phase=<Phase.REPLACED" in repr(world.effects)
    assert any(
        "drops=(SequenceRef(request_id='a', choice=0, attempt=1)" in plan for plan in world.lines("SendPlan")
    )
    assert core.on_submit(again, world.now_s)[0].known


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_name_belongs_to_the_gateway_that_had_it_first(attempt: int) -> None:
    """Keeps a gateway from replacing another's sequence, whose name stands in every heartbeat, by a higher
    attempt, and from ending it."""
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_submit(submitted(), 0.0)
    mine = roster.sequences[("a", 0)]
    with pytest.raises(ForeignSequence, match="under another name"):
        intake.on_submit(submitted(attempt=attempt, gateway_id="gateway-1"), 0.0)
    assert intake.on_cancel(cancelling(ref("a", attempt), "gateway-1"), 0.0) == [
        NoteForeign("gateway-1", ref("a", attempt))
    ]
    assert roster.sequences == {("a", 0): mine} and mine.phase is Phase.QUEUED
    assert intake.on_submit(submitted(), 0.0)[0].known


def test_a_cancel_before_the_submission_holds_for_its_gateway_alone() -> None:
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_cancel(cancelling(ref("a"), "gateway-1"), 0.0)
    assert not intake.on_submit(submitted(), 0.0)[0].known and len(roster.sequences) == 1
    intake.on_cancel(cancelling(ref("b"), "gateway-1"), 0.0)
    assert intake.on_submit(submitted("b", gateway_id="gateway-1"), 0.0)[0].known
    assert len(roster.sequences) == 1


def test_what_a_worker_had_stays_its_gateway_s_for_a_while_after_it_left() -> None:
    """A worker that is lost is announced with the names of what it had: keeps another gateway from being the
    first to submit one of them again."""
    world, _ = started()
    world.kill(world.workers["worker-0"])
    world.until(lambda: "PublishWorkerLost" in repr(world.effects), limit_s=10.0)
    core = world.core
    with pytest.raises(ForeignSequence):
        core.on_submit(submitted(attempt=9, gateway_id="gateway-1"), world.core_s)
    assert "NoteForeign" in repr(core.on_cancel(cancelling(ref("a", 9), "gateway-1"), world.core_s))
    core.on_submit(submitted(attempt=9), world.core_s)


def test_what_one_gateway_could_not_have_does_not_refuse_another() -> None:
    roster = Roster(Rules())
    intake = Intake(roster)
    intake.on_submit(submitted(gateway_id="gateway-1"), 0.0)
    roster.give_up(roster.sequences[("a", 0)], InternalError("because"), 0.0)
    with pytest.raises(InternalError):
        intake.on_submit(submitted(gateway_id="gateway-1"), 0.0)
    assert not intake.on_submit(submitted(), 0.0)[0].known


def test_a_cancel_frees_the_blocks_within_a_step() -> None:
    world = small_world(workers=1, step_s=0.02)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=40, max_tokens=40)
    other = world.ask_for("b", prompt_tokens=4, answer_tokens=40, max_tokens=40)
    world.until(lambda: len(other.tokens) > 4, limit_s=2.0)
    world.cancel(request)
    world.run_for(2 * 0.02)
    assert request.ref not in world.workers["worker-0"].held
    world.until(lambda: other.over, limit_s=4.0)
    assert other.tokens == other.expected


def test_sequences_of_a_gateway_that_is_gone_end() -> None:
    world, _ = started()
    world.gateway.incarnation = 2
    world.run_for(1.0)
    assert world.workers["worker-0"].used_blocks == 0 and "GATEWAY_LOST" in repr(world.effects)


def _busy(wait_s: float = 60.0) -> Roster:
    """One worker, which is foreseen to need so long for what waits."""
    roster = Roster(Rules(refuse_wait_s=30.0))
    report = worker_report(prefill_tokens_per_s=1000.0, decode_step_s=0.01)
    pipeline = roster.welcome(report, 1, 0.0)
    roster.note_report(pipeline, report)
    roster.unready.clear()
    intake = Intake(roster)
    number = 0
    while roster.backlog.queue.foreseen.longest_s() < wait_s:
        intake.roster.add(Sequence.from_spec(submitted(f"w{number}", prompt_tokens=150), 0.0))
        roster.backlog.queue.foreseen.on_tick(0.0, 1)
        number += 1
    return roster


def test_what_is_foreseen_to_wait_too_long_is_refused_and_told_when_to_come_again() -> None:
    roster = _busy()
    before = dict(roster.sequences)
    with pytest.raises(Overloaded, match="would wait 60 s, longer than the limit of 30 s") as refused:
        Intake(roster).on_submit(submitted("z"), 0.0)
    assert refused.value.retry_after_s == pytest.approx(60.0, rel=0.05) and roster.sequences == before
    assert not Intake(_busy(25.0)).on_submit(submitted("z"), 0.0)[0].known


def test_what_was_taken_once_is_never_refused_for_a_wait() -> None:
    intake = Intake(_busy())
    for spec_ in (
        submitted("a", attempt=2),
        submitted("b", generated=1),
        msgspec.structs.replace(submitted("c"), is_resumed=True),
        msgspec.structs.replace(submitted("d"), ref=ref("d", 1, choice=3)),
        submitted("w0"),
    ):
        intake.on_submit(spec_, 0.0)
