"""All error types of Kvasir. Each class has a wire code. `to_wire` and `from_wire` carry errors across the
bus without losing their type."""

from typing import Any, ClassVar


class KvasirError(Exception):
    """Base class. `code` is stable and travels on the wire; the message says what to do."""

    code: ClassVar[str] = "kvasir_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class CallerError(KvasirError):
    code = "caller_error"  # the caller's fault: repeating the call fails again


class InvalidMessage(CallerError):
    code = "invalid_message"  # bytes that do not decode to the expected message


class InvalidRequest(CallerError):
    code = "invalid_request"  # well-formed, but cannot be served; `param` names the field


class ContextOverflow(InvalidRequest):
    """`tokens`: lengths of the prompt, the requested answer and the context, if known."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: tuple[int, int, int] | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.tokens = tokens


class UnknownModel(InvalidRequest):
    code = "model_not_found"


class Unauthorized(CallerError):
    code = "invalid_api_key"


class PermissionRefused(CallerError):
    code = "permission_refused"  # this NATS user may not publish or subscribe to that subject


class ForeignSequence(CallerError):
    code = "foreign_sequence"  # the sequence belongs to another gateway


class StaleEpoch(CallerError):
    code = "stale_epoch"  # a command from a scheduler that has been replaced


class ModelMismatch(CallerError):
    code = "model_mismatch"  # a worker's model differs from the rest of the stack


class MessageTooLarge(CallerError):
    code = "message_too_large"  # over the server's payload limit; nothing was sent


class UnavailableError(KvasirError):
    code = "unavailable"  # temporary: retry, after `retry_after_s` if set


class DeadlineExceeded(UnavailableError):
    code = "deadline_exceeded"  # no reply in time


class NoResponder(UnavailableError):
    code = "no_responder"  # the subject has no subscriber now


class BusUnavailable(UnavailableError):
    code = "bus_unavailable"  # not connected to NATS


class PeerLost(UnavailableError):
    code = "peer_lost"  # the connection to another worker broke during a transfer


class Overloaded(UnavailableError):
    code = "overloaded"  # a queue is full


class RoleMissing(UnavailableError):
    """No worker's role allows prefill, or none allows decode."""

    code = "role_missing"


class CreditorLost(UnavailableError):
    """`creditor_id` is the worker; KV stored there must be recomputed."""

    code = "creditor_lost"

    def __init__(self, message: str, *, creditor_id: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.creditor_id = creditor_id


class CorruptedKv(UnavailableError):
    """`block` is the block that failed its check; its KV must be recomputed."""

    code = "corrupted_kv"

    def __init__(self, message: str, *, block: int = -1, **more: Any) -> None:
        super().__init__(message, **more)
        self.block = block


class NotLeader(UnavailableError):
    code = "not_leader"  # this instance is a standby


class WorkerKilled(KvasirError):
    code = "worker_killed"  # workers died whenever this request ran


class PolicyFailed(KvasirError):
    code = "policy_failed"  # a policy raised; the message names both


class ConfigError(KvasirError):
    code = "config_error"  # an invalid setting; the message says what to write instead


class InternalError(KvasirError):
    code = "internal_error"  # a bug in Kvasir


_MOST_MESSAGE_CHARS = 2000
_MOST_PARAM_CHARS = 200
_MOST_RETRY_AFTER_S = 3600.0


def _tree(root: type[KvasirError]) -> dict[str, type[KvasirError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def to_wire(error: BaseException) -> dict[str, Any]:
    """Return the error as a map. Other exceptions become an `InternalError` naming their type only."""
    if not isinstance(error, KvasirError):
        error = InternalError(f"{type(error).__name__} in the handler; its log has the traceback")
    wire: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.param is not None:
        wire["param"] = error.param
    if error.retry_after_s is not None:
        wire["retry_after_s"] = error.retry_after_s
    return wire


def from_wire(wire: dict[str, Any]) -> KvasirError:
    """Return the error that `to_wire` encoded; an unknown code becomes a plain `KvasirError`. Never raise:
    fields of unexpected type are ignored."""
    code, message, param = (wire.get(name) for name in ("code", "message", "param"))
    return _tree(KvasirError).get(code if isinstance(code, str) else "", KvasirError)(
        message[:_MOST_MESSAGE_CHARS] if isinstance(message, str) else "unknown error",
        param=param[:_MOST_PARAM_CHARS] if isinstance(param, str) else None,
        retry_after_s=_retry_after(wire.get("retry_after_s")),
    )


def _retry_after(value: object) -> float | None:
    """Return `value` if it is a valid delay in seconds, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= _MOST_RETRY_AFTER_S else None
