"""Logging: console lines on a terminal, otherwise JSON lines. The root logger is `kvasir`. Each service logs
one canonical line per request, the gateway at `info`, the others at `debug`."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

LogFormat = Literal["auto", "console", "json"]
ROOT = "kvasir"


def get_logger(name: str) -> logging.Logger:
    """Return the logger `kvasir.<name>`."""
    return logging.getLogger(f"{ROOT}.{name}")


def configure(level: str, service: str, instance: str, log_format: LogFormat = "auto") -> None:
    """Log everything under `kvasir`, and warnings of libraries, to standard error. Idempotent. `auto` selects
    console lines if standard error is a terminal, else JSON lines."""
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler()
    handler.setFormatter(
        ConsoleFormatter(instance) if log_format == "console" else JsonFormatter(service, instance)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger(ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


def canonical(logger: logging.Logger, event: str, **fields: Any) -> None:
    """Log the canonical line of a request, a start, a takeover or the like. Omit fields that are None."""
    _log(logger, logging.INFO, event, fields)


def detail(logger: logging.Logger, event: str, **fields: Any) -> None:
    """Log a line of a request for which the gateway logs the canonical one."""
    _log(logger, logging.DEBUG, event, fields)


def _log(logger: logging.Logger, level: int, event: str, fields: dict[str, Any]) -> None:
    said = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, event, extra={"fields": said})


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, service, instance, event, then the fields."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._origin = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._origin,
            "event": record.getMessage(),
        }
        for name, value in fields_of(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


class ConsoleFormatter(logging.Formatter):
    """One `12:00:00.000 INFO  worker-0 event name=value …` line per record, followed by any traceback."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).astimezone()
        parts = [
            f"{at:%H:%M:%S}.{int(record.msecs):03d} {record.levelname:<7} {self._instance}",
            _printable(record.getMessage()),
        ]
        parts += [f"{name}={_console_value(value)}" for name, value in fields_of(record).items()]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields added by `canonical` or `extra={"fields": …}`."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _console_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(text)
