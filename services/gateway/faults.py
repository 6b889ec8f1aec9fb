"""How often a sequence may end without an answer before its stream does, and with which error. Pure."""

from services.gateway.timing import StreamTiming
from shared.errors import CreditorLost, InternalError, KvasirError
from shared.messages.sequence import FinishReason


class Faults:
    """Of one stream. Losses of lent KV count as long as no token comes in between."""

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self._internal_errors = 0
        self._kv_losses = 0
        self._tokens_at_loss = -1

    def on_internal_error(self) -> bool:
        """Of the scheduler, or of an engine; true when that was one too many."""
        self._internal_errors += 1
        return self._internal_errors >= self._timing.max_internal_errors

    def on_end(self, reason: FinishReason, tokens: int) -> KvasirError | None:
        """An attempt ended without an answer, with so many tokens held; the error to end the stream with."""
        if reason is FinishReason.KV_LOST:
            has_gone_on = tokens > self._tokens_at_loss
            self._kv_losses = 1 if has_gone_on else self._kv_losses + 1
            self._tokens_at_loss = tokens
            if self._kv_losses >= self._timing.max_kv_losses:
                return CreditorLost(
                    f"workers that lent KV for this request were lost {self._kv_losses} times in a row"
                    " without a new token: try again later, or ask for less",
                    retry_after_s=5.0,
                )
        elif reason is not FinishReason.GATEWAY_LOST and self.on_internal_error():
            return InternalError(f"the engine ended the sequence {self._internal_errors} times")
        return None
