"""Which answers leave the workers that computed their prompts, and where they go."""

import msgspec

from services.placement.core.fleet import FleetCapacity
from services.placement.core.hand_overs import HandOvers, Wanted
from services.placement.core.roles import FleetRoles, Role
from services.placement.policy.fit import PrefixAware
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from tests.services.placement.rig import item, listed, report

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
    assert list(went(found)) == ["decodes", "begun"]
    assert set(went(found).values()) <= {"w1", "w2"}
    assert all(len(one.choice.costs_s) == 2 and one.choice.stays_s > 0 for one in found)


def test_one_under_way_is_not_ordered_again_and_one_that_failed_only_later() -> None:
    made = fleet(listed("a", prompt=90, blocks=6))
    overs = overs_of(made)
    (first,) = overs.next(10.0)
    assert overs.next(10.1) == [] and len(overs) == 1
    overs.on_over(first.ref, True, 10.2)
    assert overs.next(10.3) == []
    assert went(overs.next(11.0)) == {"a": first.choice.worker_id}
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
