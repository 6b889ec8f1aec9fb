"""Subjects are unique, shaped as documented, and built from checked ids only."""

import re
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import subjects

BUILDERS: list[Callable[[str], str]] = [
    subjects.worker_plan,
    subjects.worker_snapshot,
    subjects.worker_prefixes,
    subjects.worker_want,
    subjects.worker_pull,
    subjects.worker_settle,
    subjects.worker_reported,
    subjects.worker_stepped,
    subjects.worker_cached,
    subjects.worker_observed,
    subjects.predictor_revised,
    subjects.gateway_reported,
    subjects.scheduler_submit,
    subjects.scheduler_present,
    subjects.scheduler_handed,
    subjects.scheduler_cancel,
    subjects.ledger_candidates,
]
SIGNED = {name: value for name, value in vars(subjects).items() if isinstance(value, subjects.Signed)}
USERS = ("gateway-0", "scheduler-0", "predictor-0", "placement-0", "ledger-0", "worker-0", subjects.OPERATOR)
CONSTANTS = {
    name: value
    for name, value in vars(subjects).items()
    if isinstance(value, str) and value.startswith(f"{subjects.PREFIX}.")
}
SHAPE = re.compile(
    r"kvasir\.v1\.(cmd\.(?P<service>\w+)\.[a-z]+(\.(\w[\w-]*|\*)){,2}|evt\.\w+\.[a-z]+(\.\w[\w-]*|\.\*)?"
    r"|tok\.\w[\w-]*\.\w[\w-]*)"
)


def test_every_builder_is_tested() -> None:
    public = {
        value
        for name, value in vars(subjects).items()
        if callable(value)
        and not isinstance(value, type)
        and getattr(value, "__module__", "") == subjects.__name__
        and not name.startswith("_")
    }
    others = {
        subjects.checked_id,
        subjects.service_of,
        subjects.permissions_of,
        subjects.status,
        subjects.instance_status,
        subjects.recorded,
        subjects.inbox_prefix,
        subjects.is_inbox,
        subjects.micro_name,
        subjects.submit_to,
        subjects.submissions_to,
        subjects.moves_in,
    }
    assert public - others - set(SIGNED.values()) == set(BUILDERS)


def test_subjects_are_unique_and_well_shaped() -> None:
    built = [b("id-0") for b in BUILDERS] + [subjects.status(s) for s in subjects.SERVICES]
    built += [one("id-0", "id-1") for one in SIGNED.values()]
    everything = built + list(CONSTANTS.values())
    assert len(set(everything)) == len(everything)
    for subject in everything:
        match = SHAPE.fullmatch(subject)
        assert match, subject
        assert match["service"] in (None, *subjects.SERVICES), subject


@pytest.mark.parametrize(
    "bad",
    ["", "a.b", "*", ">", "a b", "a\n", "\r\nPUB x 0", "x" * 65, "ü", "a/b", "$SRV", "_INBOX.x", "a\x00"],
)
def test_bad_ids_are_refused_everywhere(bad: str) -> None:
    for build in [*BUILDERS, subjects.status, subjects.checked_id, subjects.inbox_prefix]:
        with pytest.raises(ValueError, match="is no instance id"):
            build(bad)
    for signed in SIGNED.values():
        for make in (signed.to, signed.by, partial(signed, "id-0"), partial(signed, sender="id-0")):
            with pytest.raises(ValueError, match="is no instance id"):
                make(bad)


@given(st.text(max_size=70))
def test_whatever_is_accepted_is_one_token(text: str) -> None:
    try:
        subject = subjects.tokens(text, "worker-0")
    except ValueError:
        return
    assert subject.split(".") == ["kvasir", "v1", "tok", text, "worker-0"]
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text)


def overlap(one: str, other: str) -> bool:
    """Whether a subject exists that both patterns cover."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return one.count(".") == other.count(".") and all("*" in pair or pair[0] == pair[1] for pair in pairs)


def test_whatever_may_be_sent_may_be_heard_and_the_other_way_round() -> None:
    ours = f"{subjects.PREFIX}."
    table = [subjects.permissions_of(user) for user in USERS]
    sent = {s for user in table for s in user.publish if s.startswith(ours)}
    heard = {s for user in table for s in user.subscribe if s.startswith(ours)}
    assert not [s for s in sent if not any(overlap(s, other) for other in heard)]
    told_by_the_server = {subjects.BUS_CONNECTED, subjects.BUS_DISCONNECTED}
    assert not [s for s in heard - told_by_the_server if not any(overlap(s, other) for other in sent)]
    assert told_by_the_server <= heard and not any(overlap(s, t) for s in sent for t in told_by_the_server)


def test_the_only_shard_has_the_plain_subjects_and_others_their_own() -> None:
    stem = "kvasir.v1.cmd.scheduler"
    assert subjects.submit_to(0, "gateway-0") == f"{stem}.submit.gateway-0"
    assert subjects.submit_to(2, "gateway-0") == f"{stem}.submit.2.gateway-0"
    assert (subjects.submissions_to(0), subjects.submissions_to(2)) == (
        f"{stem}.submit.*",
        f"{stem}.submit.2.*",
    )
    assert (subjects.moves_in(0), subjects.moves_in(2)) == (f"{stem}.move", f"{stem}.move.2")
    with pytest.raises(ValueError):
        subjects.submit_to(2, "gateway.0")


def test_every_subject_is_in_the_table() -> None:
    table = [subjects.permissions_of(user) for user in USERS]
    patterns = {s for user in table for s in (*user.publish, *user.subscribe)}
    built = set(CONSTANTS.values()) | {subjects.status(service) for service in subjects.SERVICES}
    to_gateways = (subjects.tokens, subjects.gateway_shadow, subjects.gateway_claim)
    built |= {one.to("gateway-0" if one in to_gateways else "worker-0") for one in SIGNED.values()}
    assert built <= patterns
    for build in BUILDERS:
        assert any(overlap(build(user), pattern) for user in USERS for pattern in patterns)


def test_everybody_has_a_name_and_an_inbox_of_its_own() -> None:
    for user in USERS:
        permissions = subjects.permissions_of(user)
        inboxes = {s for s in permissions.subscribe if s.startswith("_INBOX")}
        assert inboxes == {f"{subjects.inbox_prefix(user)}.>"}
        for pattern in {*permissions.publish, *permissions.subscribe} - inboxes - {"$SRV.>"}:
            assert ">" not in pattern, pattern
            assert pattern.split(".").index("*") > 1 if "*" in pattern else True, pattern
        service = user.partition("-")[0]
        assert not any(s.startswith("$SRV") for s in permissions.publish) or user == subjects.OPERATOR
        assert not any(s.startswith(("$JS", "$KV")) for s in permissions.publish) or service == "scheduler"
        assert not any(s.startswith(("$JS", "$KV")) for s in permissions.subscribe)
