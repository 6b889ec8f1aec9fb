"""Every error crosses the wire with its type."""

from itertools import product

import msgpack  # type: ignore[import-untyped]
import pytest

from shared import errors
from shared.errors import KvasirError, from_wire, to_wire


def tree_of(error: type[KvasirError]) -> list[type[KvasirError]]:
    return [
        error,
        *(found for child in error.__subclasses__() if _is_ours(child) for found in tree_of(child)),
    ]


def _is_ours(error: type) -> bool:
    return error.__module__ == errors.__name__


ALL = tree_of(KvasirError)


def test_wire_codes_are_unique_and_stable_looking() -> None:
    codes = [error.code for error in ALL]
    assert len(set(codes)) == len(codes)
    assert all(code.isidentifier() and code == code.lower() for code in codes)


@pytest.mark.parametrize("error_type", ALL)
def test_every_error_crosses_the_wire(error_type: type[KvasirError]) -> None:
    for error in (error_type("what to do"), error_type("what to do", param="n", retry_after_s=1.5)):
        arrived = from_wire(msgpack.unpackb(msgpack.packb(to_wire(error))))
        assert type(arrived) is error_type
        assert (arrived.message, arrived.param, arrived.retry_after_s) == (
            error.message,
            error.param,
            error.retry_after_s,
        )
        assert str(arrived) == "what to do"


def test_an_odd_error_is_an_error_all_the_same() -> None:
    """Keeps what a peer writes into an error from becoming a header or a length somewhere else."""
    odd = product(
        ("overloaded", "no such code", 5, None, ["x"]),
        ("x", "A" * 100_000, 5, None),
        (None, 5, ["a"], "p", "p" * 5000),
        (float("inf"), float("nan"), "soon", -5, [1], True, 2**64, 1.5),
    )
    for code, message, param, retry_after_s in odd:
        arrived = from_wire(
            {"code": code, "message": message, "param": param, "retry_after_s": retry_after_s}
        )
        assert len(arrived.message) <= 2000
        assert arrived.param is None or len(arrived.param) <= 200
        assert arrived.retry_after_s in (None, 1.5)


def test_foreign_exceptions_leave_only_their_type() -> None:
    arrived = from_wire(to_wire(ValueError("a secret")))
    assert type(arrived) is errors.InternalError
    assert "ValueError" in arrived.message and "secret" not in arrived.message


@pytest.mark.parametrize("wire", [{"code": "from_the_future", "message": "m"}, {}, {"code": 7, "extra": []}])
def test_an_unknown_code_is_a_plain_error(wire: dict[str, object]) -> None:
    assert type(from_wire(wire)) is KvasirError
