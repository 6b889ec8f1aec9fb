"""Processes of this code and of the release before it understand each other, message by message, both ways.

What a release says is a file of this repository, so that a clone without tags or history is enough.
"""

import copy
import json
from typing import Any

import pytest

from shared.release import works_with
from tests.shared.messages.release import RELEASES, described, differences

STORED = {int(path.stem): path for path in RELEASES.glob("*.json")}
SUPPORTED = sorted(release for release in STORED if works_with(release))


def stored(release: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED[release].read_text())
    return found


def test_there_is_a_release_to_compare_with() -> None:
    assert SUPPORTED, (
        "PROTOCOL was raised before the release's messages were written: go back to its commit, run"
        " `python -m tests.shared.messages.release` there, and add the file"
    )


@pytest.mark.parametrize("release", SUPPORTED)
def test_no_message_of_a_supported_release_has_changed(release: int) -> None:
    """But for new fields, which have defaults."""
    found = differences(stored(release), described())
    assert not found, (
        f"processes of release {release} run beside these while a stack is rolled (docs/upgrades.md). Leave"
        " what they know as it is, and add a field with a default, or a message, that says it anew. What"
        " cannot be said so waits until that release is no longer supported (shared/release.py). Changed: "
        + "; ".join(found)
    )


def test_a_new_field_with_a_default_is_no_difference() -> None:
    old = described()
    new = copy.deepcopy(old)
    new["CancelSequence"]["properties"]["colour"] = {"type": "string", "default": "blue"}
    new["New"] = {"type": "object", "properties": {}, "required": []}
    new["TokenDelta"]["prefixItems"].append({"type": "integer", "default": 0})
    assert differences(old, new) == []


def gone(new: dict[str, Any]) -> None:
    del new["SequenceRef"]["properties"]["choice"]


def required(new: dict[str, Any]) -> None:
    new["CancelSequence"]["properties"]["colour"] = {"type": "string"}
    new["CancelSequence"]["required"].append("colour")


def left_out(new: dict[str, Any]) -> None:
    """An old reader wants it, and a default is not sent."""
    new["SequenceRef"]["required"].remove("attempt")


def another_default(new: dict[str, Any]) -> None:
    new["AnswerSoFar"]["properties"]["cached_tokens"]["default"] = 1


def wider(new: dict[str, Any]) -> None:
    """An old reader refuses what is above its bound."""
    new["AnswerSoFar"]["properties"]["cached_tokens"]["maximum"] *= 2


def another_row(new: dict[str, Any]) -> None:
    new["TokenDelta"]["prefixItems"].insert(1, {"type": "integer"})


def another_value(new: dict[str, Any]) -> None:
    new["FinishReason"]["enum"].append("bored")


def no_message(new: dict[str, Any]) -> None:
    del new["WorkerReported"]


@pytest.mark.parametrize(
    "change", [gone, required, left_out, another_default, wider, another_row, another_value, no_message]
)
def test_what_would_not_be_understood_is_named(change: Any) -> None:
    old = described()
    new = copy.deepcopy(old)
    change(new)
    found = differences(old, new)
    assert len(found) == 1, found
