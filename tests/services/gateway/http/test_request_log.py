"""The log line of a request."""

import re

import pytest

from services.gateway.http.middleware import RequestRecord, echoed_id, new_request_id
from shared.errors import Overloaded


def test_ids_are_long_and_different() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"req_[0-9a-f]{32}", one) for one in ids)


@pytest.mark.parametrize("fit", ["a", "A-Z_0.9", "x" * 64])
def test_a_fit_id_is_echoed(fit: str) -> None:
    assert echoed_id(fit) == fit


@pytest.mark.parametrize("unfit", [None, "", "x" * 65, "a b", "a\n", "a\r\nb", "é", "a/b"])
def test_an_unfit_id_is_not(unfit: str | None) -> None:
    assert echoed_id(unfit) is None


def test_only_what_is_known_is_said() -> None:
    record = RequestRecord("GET", "/v1/models", began_s=10.0)
    record.status = 200
    said = {name: value for name, value in record.fields(11.5).items() if value is not None}
    assert said == {
        "request_id": record.request_id,
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
        "duration_s": 1.5,
    }


def test_errors_times_and_names_of_clients() -> None:
    record = RequestRecord("POST", "/v1/completions", began_s=10.0, accepted_s=10.5)
    record.first_token_s = 0.25
    record.error = Overloaded("the queue is full")
    record.ignored = [*map(str, range(50))]
    said = record.fields(12.0)
    assert (said["error"], said["error_text"]) == ("overloaded", "the queue is full")
    assert said["first_token_s"] == 0.25
    names = said["ignored"]
    assert isinstance(names, list) and len(names) == 10
    record.error = ValueError("x")
    assert record.fields(12.0)["error"] == "ValueError"
