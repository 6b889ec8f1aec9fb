"""Roles, and how many workers should run: assignment, changes, costs of a split, hand-overs."""

from dataclasses import replace
from math import isfinite

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.fleet import FleetCapacity
from services.placement.core.hand_overs import HandOvers, Wanted
from services.placement.core.role_costs import Demand, Speeds, request_s
from services.placement.core.roles import (
    BOTH,
    CHANGES,
    EVEN,
    LEAST_SEEN,
    FleetRoles,
    Landing,
    Role,
    RoleChoice,
    WorkerLoad,
    read_roles,
)
from services.placement.core.scaling import Scaling
from services.placement.policy.fit import PrefixAware
from shared.errors import ConfigError
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from tests.services.placement.rig import item, listed, report

SPEEDS = Speeds(6800.0, 0.0235, 6e-7, 56_000, 1024, link_tokens_per_s=30_000.0)
LONG_PROMPTS = Demand(12.0, 2048.0, 0.9, 28.0, 2062.0)


def load(worker_id: str, **changes: float) -> WorkerLoad:
    blank = WorkerLoad(worker_id, 56_000, 10_000, 5, 0, 6000.0, 0.03, 30_000.0)
    return replace(blank, **changes)  # type: ignore[arg-type]


def feed(roles: FleetRoles, *, prompt_tokens: int, answer_tokens: int, per_s: float, seconds: float) -> float:
    """A steady demand; returns when it ended."""
    count = int(per_s * seconds)
    for at in range(count):
        roles.on_placed((str(at), 0), prompt_tokens, 0, at / per_s)
        roles.on_ended((str(at), 0), answer_tokens)
    return count / per_s


def settle(
    roles: FleetRoles, workers: int, now_s: float, looks: int = 5, **changes: float
) -> RoleChoice | None:
    found = None
    for look in range(looks):
        contexts = [8_000 + 1_000 * at for at in range(workers)]
        loads = [
            load(f"w{at}", **{"context_tokens": tokens, "decode_step_s": 0.0235 + 6e-7 * tokens, **changes})
            for at, tokens in enumerate(contexts)
        ]
        found = roles.on_epoch(loads, 0, 1024, now_s + look) or found
        roles.check_integrity()
    return found


@pytest.mark.parametrize("choice", [["prefil"], "sometimes"])
def test_an_unknown_role_is_refused_with_those_that_exist(choice: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"adaptive, both, .*prefill, decode"):
        read_roles(choice)


def test_fixed_roles_go_by_turn_and_a_newcomer_takes_the_place_of_who_is_gone() -> None:
    roles = FleetRoles((Role.PREFILL, Role.DECODE))
    assert roles.shortage() == "", "nobody is there, and nobody can tell yet"
    roles.on_workers(["a"])
    assert "decode" not in roles.shortage() and "prefill" in roles.shortage()
    roles.on_workers(["a", "b", "c"])
    assert [roles.role_of(name) for name in "abc"] == [Role.PREFILL, Role.DECODE, Role.BOTH]
    roles.on_workers(["b", "c", "d"])
    assert [roles.role_of(name) for name in "bcd"] == [Role.DECODE, Role.BOTH, Role.PREFILL]
    roles.on_workers(["b"])
    assert "compute prompts" in roles.shortage()


def test_a_split_pays_where_prompts_are_long_and_not_where_there_is_little_to_do() -> None:
    seconds = {count: request_s(SPEEDS, LONG_PROMPTS, 8, count, 0.03) for count in range(8)}
    best = min(seconds, key=lambda count: seconds[count].request_s)
    assert best in (1, 2, 3) and seconds[best].request_s < 0.8 * seconds[0].request_s
    assert seconds[6].request_s > 2 * seconds[0].request_s, "two workers cannot compute all prompts"
    idle = replace(LONG_PROMPTS, requests_per_s=0.1)
    assert request_s(SPEEDS, idle, 8, 2, 0.03).request_s > 0.9 * request_s(SPEEDS, idle, 8, 0, 0.03).request_s


def test_a_slow_link_keeps_answers_where_they_are() -> None:
    slow = replace(SPEEDS, link_tokens_per_s=500.0)
    found = [request_s(slow, LONG_PROMPTS, 8, count, 0.03) for count in range(8)]
    assert min(found, key=lambda one: one.request_s) is found[0]


@settings(max_examples=200)
@given(
    st.floats(0.01, 1000),
    st.floats(1, 200_000),
    st.floats(0, 50),
    st.floats(1, 5000),
    st.integers(1, 64),
    st.floats(1.0, 1e6),
    st.data(),
)
def test_seconds_are_finite_whatever_arrives(
    rate: float,
    prompt: float,
    variation: float,
    answer: float,
    workers: int,
    link: float,
    data: st.DataObject,
) -> None:
    decoders = data.draw(st.integers(0, workers - 1))
    demand = Demand(rate, prompt, variation, answer, prompt + answer / 2)
    found = request_s(replace(SPEEDS, link_tokens_per_s=link), demand, workers, decoders, 0.01)
    assert isfinite(found.request_s) and found.request_s > 0 and 0 < found.first_token_s <= found.request_s
    assert 0.0 <= found.handed_over_share <= (1.0 if decoders else 0.0)
    assert 0 < found.felt_s <= found.request_s * (1 + 1e-9)


def test_what_precedes_a_prompt_token_is_measured_and_long_prompts_cost_more_than_their_tokens() -> None:
    """As of workers whose prompt tokens take 0.14 ms, and 16 ns more for each one before them."""
    roles = FleetRoles(None)
    for at in range(LEAST_SEEN):
        long, short = 60_000, 2_000
        roles.on_placed((str(at), 0), long if at % 4 == 0 else short, 0, at / 2)
        roles.on_ended((str(at), 0), 300)
    for look in range(20):
        preceding = [500.0 + 5_000 * worker + 100 * look for worker in range(4)]
        loads = [
            load(
                f"w{worker}",
                prefill_context_tokens=tokens,
                prefill_tokens_per_s=1 / (1.4e-4 + 1.6e-8 * tokens),
            )
            for worker, tokens in enumerate(preceding)
        ]
        speeds = roles._measure(loads, 1024)
    assert speeds is not None and speeds.preceding_token_s == pytest.approx(1.6e-8, rel=0.01)
    assert speeds.prompt_tokens_per_s == pytest.approx(1 / 1.4e-4, rel=0.01)
    share = speeds.preceding_token_s * speeds.prompt_tokens_per_s
    demand, tokens_only = roles.demand.read(0, share, 64.0), roles.demand.read(0, 0.0, 64.0)
    assert demand is not None and tokens_only is not None
    assert demand.preceding_tokens == pytest.approx((60_000**2 / 4 + 2_000**2 * 3 / 4) / 2, rel=0.02)
    assert demand.prompt_variation > tokens_only.prompt_variation, "who is long takes longer than that"
    alone = replace(speeds, preceding_token_s=0.0)
    seconds, fewer = (request_s(each, demand, 4, 0, 0.03).first_token_s for each in (speeds, alone))
    assert seconds > 1.5 * fewer


def test_roles_adapt_only_after_enough_was_seen_and_turn_back_when_it_does_not_pay() -> None:
    roles = FleetRoles(None)
    assert settle(roles, 8, 0.0) is None
    now_s = feed(roles, prompt_tokens=2048, answer_tokens=28, per_s=12.0, seconds=30)
    choice = settle(roles, 8, now_s)
    assert choice is not None and choice.before == BOTH
    assert {Role.PREFILL, Role.DECODE} == set(choice.roles.values())
    assert choice.costs_s[choice.chosen] < choice.costs_s[BOTH]
    # Now hardly anything has to be computed: what is left is writing, and all are better at that.
    for at in range(40 * LEAST_SEEN):
        roles.on_placed((f"late{at}", 0), 40, 0, now_s + 5 + at / 10)
        roles.on_ended((f"late{at}", 0), 400)
    settle(roles, 8, now_s + 5 + 4 * LEAST_SEEN, looks=10)
    kinds = [roles.role_of(f"w{at}") for at in range(8)]
    assert kinds.count(Role.PREFILL) <= 2


Step = tuple[float, int, int, int, float]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0.5, 60),
            st.integers(1, 30_000),
            st.integers(1, 2000),
            st.integers(0, 9),
            st.floats(0.0, 0.2),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_arrives_somebody_computes_prompts_and_somebody_writes_answers(steps: list[Step]) -> None:
    """Workers come and go, sometimes all of them, demand jumps; a change saves what it has to, and equal
    events give equal roles."""
    twins = FleetRoles(None), FleetRoles(None)
    now_s = number = 0.0
    for per_s, prompt, answer, workers, step_s in steps:
        choices = []
        for roles in twins:
            for at in range(LEAST_SEEN):
                key = (f"{number}/{at}", 0)
                roles.on_placed(key, prompt, prompt // 3, now_s + at / per_s)
                roles.on_ended(key, answer)
            until_s = now_s + LEAST_SEEN / per_s
            choices.append(settle(roles, workers, until_s, decode_step_s=step_s))
            assert set(roles._roles) == {f"w{at}" for at in range(workers)}
            kinds = [roles.role_of(f"w{at}") for at in range(workers)]
            if workers > 1:
                assert any(kind.may_prefill for kind in kinds) and any(kind.may_decode for kind in kinds)
        assert choices[0] == choices[1]
        choice = choices[0]
        if choice is not None and choice.before != "mixed":
            pays = choice.costs_s[choice.chosen] <= (1 - CHANGES) * choice.costs_s[choice.before] + 1e-9
            seconds = twins[0].seconds
            shares = [seconds[name].handed_over_share for name in (choice.before, choice.chosen)]
            assert pays or 0 < shares[0] < shares[1], "faster, or fewer answers beside prompts"
            assert pays or choice.costs_s[choice.chosen] <= (1 + EVEN) * min(choice.costs_s.values())
        now_s, number = until_s + 10.0, number + 1


def test_an_answer_goes_where_it_is_over_first_or_stays() -> None:
    roles = FleetRoles(None)
    feed(roles, prompt_tokens=2000, answer_tokens=30, per_s=10, seconds=20)
    busy = load("p", pending_tokens=5_000)
    for _ in range(3):
        for context in (5_000, 40_000):
            roles.on_epoch([load("d", context_tokens=context), busy], 0, 1024, 30.0)
    free, full = Landing(load("a", context_tokens=2_000), 0.0), Landing(load("b", context_tokens=50_000), 0.0)
    found = roles.hand_over(2_000, busy, [full, free])
    assert found.worker_id == "a"
    assert [name for name, _ in found.costs_s] == ["a", "b"] and found.costs_s[0][1] < found.stays_s
    late = Landing(load("c"), 60.0)
    assert roles.hand_over(2_000, busy, [late]).worker_id is None, "its link is busy for a minute"
    assert roles.hand_over(2_000, busy, []).worker_id is None
    fixed = FleetRoles((Role.PREFILL, Role.DECODE))
    assert fixed.hand_over(2_000, busy, [late]).worker_id == "c", "as it was told to"


FIXED = (Role.PREFILL, Role.DECODE, Role.DECODE)
OTHERS = frozenset({"w1", "w2"})


def overs_of(made: FleetCapacity) -> HandOvers:
    roles = FleetRoles(FIXED)
    roles.on_workers(made.workers)
    return HandOvers(made, roles)


def fleet(*at_prefill: SequenceReport, free: tuple[int, int] = (60, 30), **changes: object) -> FleetCapacity:
    made = FleetCapacity()
    hear(made, report("w0", sequences=at_prefill), **changes)
    for name, blocks in zip(("w1", "w2"), free, strict=True):
        hear(made, report(name, free=blocks), **changes)
    return made


def hear(made: FleetCapacity, heard: WorkerReported, **changes: object) -> None:
    said = {"kv_block_bytes": 1000, "fingerprint": b"same", **changes}
    made.on_reported(msgspec.structs.replace(heard, **said), 10.0)


def prompt(request: str, computed: int, of: int = 100) -> SequenceReport:
    waiting = computed == 0
    state = SequenceState.WAITING if waiting else SequenceState.PREFILLING
    return msgspec.structs.replace(
        listed(request, prompt=of, blocks=7, state=state), computed_tokens=computed, generated_tokens=0
    )


def went(found: list[Wanted]) -> dict[str, str | None]:
    return {one.ref.request_id: one.choice.worker_id for one in found}


def test_who_decodes_and_whose_prompt_has_been_begun_is_handed_over() -> None:
    made = fleet(listed("decodes", prompt=90, blocks=6), prompt("begun", 48), prompt("waits", 0))
    found = overs_of(made).next(10.0)
    assert list(went(found)) == ["decodes", "begun"] and set(went(found).values()) <= {"w1", "w2"}
    assert all(len(one.choice.costs_s) == 2 and one.choice.stays_s > 0 for one in found)


def test_one_under_way_is_not_ordered_again_and_one_that_failed_only_later() -> None:
    made = fleet(listed("a", prompt=90, blocks=6))
    overs = overs_of(made)
    (first,) = overs.next(10.0)
    assert overs.next(10.1) == [] and len(overs) == 1
    overs.on_over(first.ref, True, 10.2)
    assert overs.next(10.3) == [] and went(overs.next(11.0)) == {"a": first.choice.worker_id}
    assert went(overs.next(50.0)) == {"a": first.choice.worker_id}, "nobody ever said what became of it"


def test_what_is_on_its_way_takes_room_and_link() -> None:
    made = fleet(*(listed(f"r{at}", prompt=300, blocks=19) for at in range(3)), free=(40, 0))
    overs = overs_of(made)
    found = overs.next(10.0)
    assert list(went(found).values()) == ["w1", None, None], "w2 is full, and one fills w1"
    assert overs.next(10.1) == [], "those that stay are looked at again later"


def test_kv_of_another_kind_goes_nowhere() -> None:
    made = fleet(listed("a", prompt=90, blocks=6))
    hear(made, report("w1", free=60, seq=2), fingerprint=b"other")
    hear(made, report("w2", free=60, seq=2), fingerprint=b"other")
    assert list(went(overs_of(made).next(10.0)).values()) == [None]


def test_the_only_prompt_of_a_worker_is_handed_over_before_a_heartbeat_shows_that_it_was_begun() -> None:
    made = fleet()
    overs = overs_of(made)
    made.place((item("alone"),), OTHERS, PrefixAware(), 10.0)
    assert overs.next(10.01) == [], "it is on its way to its worker"
    assert list(went(overs.next(10.05))) == ["alone"]
    assert overs.next(10.1) == [], "and once only"
    made.place((item("second"),), OTHERS, PrefixAware(), 10.1)
    assert overs.next(10.2) == [], "which of the two is computed nobody knows yet"
    hear(made, report("w0", seq=2, sequences=(prompt("alone", 48), prompt("second", 0))))
    assert overs.next(10.3) == []
    hear(made, report("w0", seq=3, sequences=(prompt("second", 0),)))
    assert list(went(overs.next(10.4))) == ["second"], "it waited, and nothing is before it any more"


FOUR = ["w0", "w1", "w2", "w3"]


def test_what_is_idle_for_long_is_parked_down_to_the_least() -> None:
    scaling = Scaling(least=2, linger_s=10)
    assert scaling.on_epoch(FOUR, ["w1", "w2", "w3"], 0, 0.0) == ([], [])
    assert scaling.on_epoch(FOUR, ["w1", "w3"], 0, 9.0) == ([], [])
    assert scaling.on_epoch(FOUR, ["w1", "w2", "w3"], 0, 10.0) == (["w3", "w1"], [])
    assert (scaling.wanted, scaling.parked) == (2, {"w1", "w3"})
    assert scaling.on_epoch(["w0", "w2"], ["w2"], 0, 99.0) == ([], []) and scaling.parked == set()


def test_somebody_who_waits_gets_a_parked_worker_back_or_a_new_one() -> None:
    scaling = Scaling(linger_s=0, start_s=30, most=4)
    scaling.on_epoch(FOUR[:2], ["w1"], 0, 0.0)
    assert scaling.parked == {"w1"} and scaling.on_epoch(FOUR[:2], [], 3, 1.0) == ([], ["w1"])
    assert scaling.on_epoch(FOUR[:2], [], 3, 2.0) == ([], []) and scaling.wanted == 3
    scaling.on_epoch(FOUR[:2], [], 3, 3.0)
    assert scaling.wanted == 3, "one start at a time"
    scaling.on_epoch(FOUR[:3], [], 1, 4.0)
    assert scaling.wanted == 4
    scaling.on_epoch(FOUR, [], 1, 5.0)
    assert scaling.wanted == 4, "no more than there may be"


def test_a_start_that_never_comes_is_asked_for_again() -> None:
    scaling = Scaling(start_s=30)
    scaling.on_epoch(["w0"], [], 1, 0.0)
    scaling.on_epoch(["w0"], [], 0, 1.0)
    assert scaling.wanted == 2, "it is on its way"
    scaling.on_epoch(["w0"], [], 0, 31.0)
    assert scaling.wanted == 1
    scaling.on_epoch(["w0"], [], 1, 32.0)
    assert scaling.wanted == 2


@given(
    st.lists(st.tuples(st.sets(st.sampled_from(FOUR)), st.integers(0, 2), st.floats(0, 50)), max_size=40),
    st.integers(1, 3),
    st.integers(3, 5),
)
def test_between_least_and_most(history: list[tuple[set[str], int, float]], least: int, most: int) -> None:
    """Whoever obeys (stops what is parked, starts up to what is wanted) keeps within the bounds."""
    scaling = Scaling(least=least, most=most, linger_s=5, start_s=20)
    running, now_s = FOUR[:least], 0.0
    for idle, wanting, pause_s in history:
        now_s += pause_s
        parked, unparked = scaling.on_epoch(running, sorted(idle & set(running)), wanting, now_s)
        scaling.check_integrity()
        assert set(parked) <= idle & set(running) and not set(parked) & set(unparked)
        assert not wanting or not parked
        assert len(set(running) - scaling.parked) >= min(least, len(running))
        assert least <= scaling.wanted <= max(most, len(running))
        running = [name for name in running if name not in scaling.parked]
        while len(running) < min(scaling.wanted, len(FOUR)):
            running.append(next(name for name in FOUR if name not in running))
