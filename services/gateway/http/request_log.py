"""What is said of one HTTP request in its canonical log line."""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.errors import shown
from services.gateway.text.choice_text import ChoiceText
from shared.clock import monotonic_s
from shared.errors import KvasirError

_ECHOED = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def new_request_id() -> str:
    """128 random bits; a client's own id is never used for anything but echoing."""
    return f"req_{secrets.token_hex(16)}"


def echoed_id(client_id: str | None) -> str | None:
    """The client's X-Request-Id when it is fit to be sent back."""
    return client_id if client_id is not None and _ECHOED.fullmatch(client_id) else None


@dataclass
class RequestRecord:
    """Filled while the request is served, logged once at its end."""

    method: str
    path: str
    client_request_id: str | None = None
    request_id: str = field(default_factory=new_request_id)
    began_s: float = field(default_factory=monotonic_s)
    accepted_s: float | None = None
    """When the whole request had arrived and was found valid."""
    first_token_s: float | None = None
    tenant: str = ""
    """Digest of its key."""
    trace_id: str | None = None
    status: int | None = None
    error: BaseException | None = None
    is_gone: bool = False
    stream: bool | None = None
    prompt_tokens: int | None = None
    unknown_fields: Sequence[str] = ()
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reasons: dict[str, int] = field(default_factory=dict)
    handovers: dict[str, int] = field(default_factory=dict)

    def note_first_token(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = monotonic_s()

    def note_answers(self, answers: Sequence[ChoiceText]) -> None:
        self.completion_tokens = sum(answer.completion_tokens for answer in answers)
        self.cached_tokens = sum(answer.stream.cached_tokens for answer in answers)
        for answer in answers:
            reason = str(answer.finish_reason or answer.stream.phase)
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
            for cause, count in answer.stream.handovers.items():
                self.handovers[cause] = self.handovers.get(cause, 0) + count

    def fields(self, now_s: float) -> dict[str, object]:
        """Everything known, by name; None is not."""
        code = self.error.code if isinstance(self.error, KvasirError) else None
        return {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "trace_id": self.trace_id,
            "method": self.method,
            "path": shown(self.path, 256),
            "status": self.status,
            "key": self.tenant[:8] or None,
            "duration_s": round(now_s - self.began_s, 6),
            "first_token_s": _since(self.accepted_s, self.first_token_s),
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens or None,
            "finish_reasons": self.finish_reasons or None,
            "handovers": self.handovers or None,
            "unknown_fields": [name[:64] for name in self.unknown_fields[:10]] or None,
            "error": code or (type(self.error).__name__ if self.error else None),
            "error_text": shown(str(self.error)) if self.error else None,
            "client_gone": self.is_gone or None,
        }


def _since(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round(end_s - start_s, 6)
