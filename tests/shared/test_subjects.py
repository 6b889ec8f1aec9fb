"""Subjects are unique, shaped as documented, and built from checked ids only."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import subjects

BUILDERS: list[Callable[[str], str]] = [
    subjects.worker_plan,
    subjects.worker_snapshot,
    subjects.worker_cancel,
    subjects.worker_fetch,
    subjects.worker_acknowledge,
    subjects.worker_prefixes,
    subjects.worker_want,
    subjects.worker_dial,
    subjects.worker_pull,
    subjects.worker_extend,
    subjects.worker_borrow,
    subjects.worker_renew,
    subjects.worker_repay,
    subjects.worker_settle,
    subjects.worker_reported,
    subjects.worker_stepped,
    subjects.worker_cached,
    subjects.gateway_reported,
    subjects.tokens,
]
CONSTANTS = {
    name: value
    for name, value in vars(subjects).items()
    if isinstance(value, str) and value.startswith(f"{subjects.PREFIX}.")
}
SHAPE = re.compile(
    r"kvasir\.v1\.(cmd\.(?P<service>\w+)\.[a-z]+(\.\w[\w-]*)?|evt\.\w+\.[a-z]+(\.\w[\w-]*|\.\*)?|tok\.\w[\w-]*)"
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
    others = {subjects.checked_id, subjects.status, subjects.inbox_prefix, subjects.micro_name}
    assert public - others == set(BUILDERS)


def test_subjects_are_unique_and_well_shaped() -> None:
    built = [build("id-0") for build in BUILDERS] + [
        subjects.status(service) for service in subjects.SERVICES
    ]
    everything = built + list(CONSTANTS.values())
    assert len(set(everything)) == len(everything)
    for subject in everything:
        match = SHAPE.fullmatch(subject)
        assert match, subject
        assert match["service"] in (None, *subjects.SERVICES), subject


@pytest.mark.parametrize(
    ("wildcard", "build"),
    [
        (subjects.ANY_WORKER_REPORTED, subjects.worker_reported),
        (subjects.ANY_WORKER_STEPPED, subjects.worker_stepped),
        (subjects.ANY_WORKER_CACHED, subjects.worker_cached),
        (subjects.ANY_GATEWAY_REPORTED, subjects.gateway_reported),
    ],
)
def test_a_wildcard_covers_its_instances(wildcard: str, build: Callable[[str], str]) -> None:
    assert build("some-id") == wildcard.removesuffix("*") + "some-id"


@pytest.mark.parametrize(
    "bad",
    ["", "a.b", "*", ">", "a b", "a\n", "\r\nPUB x 0", "x" * 65, "ü", "a/b", "$SRV", "_INBOX.x", "a\x00"],
)
def test_bad_ids_are_refused_everywhere(bad: str) -> None:
    for build in [*BUILDERS, subjects.status, subjects.checked_id, subjects.inbox_prefix]:
        with pytest.raises(ValueError, match="is no instance id"):
            build(bad)


@given(st.text(max_size=70))
def test_whatever_is_accepted_is_one_token(text: str) -> None:
    try:
        subject = subjects.tokens(text)
    except ValueError:
        return
    assert subject.split(".") == ["kvasir", "v1", "tok", text]
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text)


def test_whatever_may_be_sent_may_be_heard_and_the_other_way_round() -> None:
    ours = f"{subjects.PREFIX}."
    sent = {s for user in subjects.PERMISSIONS.values() for s in user.publish if s.startswith(ours)}
    heard = {s for user in subjects.PERMISSIONS.values() for s in user.subscribe if s.startswith(ours)}
    assert sent == heard


def test_every_subject_is_in_the_table() -> None:
    patterns = {s for user in subjects.PERMISSIONS.values() for s in (*user.publish, *user.subscribe)}
    built = {build("x").removesuffix("x") + "*" for build in BUILDERS} | {
        subjects.status(service) for service in subjects.SERVICES
    }
    assert built | set(CONSTANTS.values()) <= patterns


def test_one_user_per_service_and_no_wildcard_over_another() -> None:
    assert set(subjects.PERMISSIONS) == {*subjects.SERVICES, subjects.OPERATOR}
    for user, permissions in subjects.PERMISSIONS.items():
        inboxes = {s for s in permissions.subscribe if s.startswith("_INBOX")}
        assert inboxes == {f"{subjects.inbox_prefix(user)}.>"}
        for pattern in {*permissions.publish, *permissions.subscribe} - inboxes - {"$SRV.>"}:
            assert ">" not in pattern, pattern
            assert pattern.split(".").index("*") > 1 if "*" in pattern else True, pattern
        assert not any(s.startswith("$SRV") for s in permissions.publish) or user == subjects.OPERATOR
        assert not any(s.startswith(("$JS", "$KV")) for s in permissions.publish) or user == "scheduler"
        assert not any(s.startswith(("$JS", "$KV")) for s in permissions.subscribe)
