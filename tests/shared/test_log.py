"""What a line looks like, for people and for machines."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import log
from shared.log import ConsoleFormatter, JsonFormatter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Writes nowhere until a test gives it a handler."""
    made = log.get_logger("test_log")
    made.setLevel(logging.DEBUG)
    made.propagate = False
    yield made
    made.handlers.clear()
    made.propagate = True


def lines(logger: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return out


def test_a_canonical_line_as_json(logger: logging.Logger) -> None:
    out = lines(logger, JsonFormatter("worker", "worker-0"))
    log.canonical(logger, "request", request_id="req_1", tokens=5, seconds=0.25, reason=None, odd={1: {2}})
    line = json.loads(out.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "kvasir.test_log",
        "service": "worker",
        "instance": "worker-0",
        "event": "request",
        "request_id": "req_1",
        "tokens": 5,
        "seconds": 0.25,
        "odd": {"1": "{2}"},
    }


def test_fields_never_overwrite_where_a_line_comes_from(logger: logging.Logger) -> None:
    out = lines(logger, JsonFormatter("worker", "worker-0"))
    log.canonical(logger, "request", service="forged", level="forged", extra="kept")
    line = json.loads(out.getvalue())
    assert (line["service"], line["level"], line["extra"]) == ("worker", "info", "kept")


def test_a_canonical_line_for_people(logger: logging.Logger) -> None:
    out = lines(logger, ConsoleFormatter("worker-0"))
    log.canonical(logger, "request", tokens=5, seconds=0.123456789, words="two words", empty="")
    assert out.getvalue().endswith(
        " INFO    worker-0 request tokens=5 seconds=0.123457 words='two words' empty=''\n"
    )


@pytest.mark.parametrize("formatter", [ConsoleFormatter("worker-0"), JsonFormatter("worker", "worker-0")])
def test_nothing_logged_makes_a_second_line(logger: logging.Logger, formatter: logging.Formatter) -> None:
    out = lines(logger, formatter)
    log.canonical(logger, "one\ntwo", name="a\r\nINFO forged\x1b[31m\u2028")
    assert out.getvalue().count("\n") == 1 and "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


@pytest.mark.parametrize("formatter", [ConsoleFormatter("worker-0"), JsonFormatter("worker", "worker-0")])
def test_tracebacks_are_kept(logger: logging.Logger, formatter: logging.Formatter) -> None:
    out = lines(logger, formatter)
    try:
        raise ZeroDivisionError("the cause")
    except ZeroDivisionError:
        logger.exception("it broke: %d", 7)
    assert "ZeroDivisionError: the cause" in out.getvalue() and "it broke: 7" in out.getvalue()


SCRIPT = """
import logging, sys
from shared import log
log.configure(*sys.argv[1:])
log.get_logger("x").debug("fine")
log.get_logger("x").info("said")
logging.getLogger("another").info("unsaid")
logging.getLogger("another").warning("warned")
log.configure(*sys.argv[1:])
log.get_logger("x").info("once")
"""


@pytest.mark.parametrize(
    ("level", "log_format", "events"),
    [
        ("info", "auto", ["said", "warned", "once"]),
        ("debug", "json", ["fine", "said", "warned", "once"]),
        ("error", "json", ["warned"]),
    ],
)
def test_configure(level: str, log_format: str, events: list[str]) -> None:
    """Standard error is no terminal here, so `auto` is JSON."""
    command = [sys.executable, "-c", SCRIPT, level, "worker", "worker-0", log_format]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == events
    assert done.stdout == ""
