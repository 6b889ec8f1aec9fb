"""How long a sequence this worker can serve with the help of the others: the context that it announces. Pure.

What others lend at most counts, not what they would lend now: a limit that came and went with the load would
be of no use to callers. It falls only after it has been lower for a while, so that a worker's restart refuses
nobody.
"""

from shared.messages.reports import WorkerReported

_HOLD_S = 30.0
_SILENCE_S = 5.0


class Reach:
    """Of one worker among its neighbours."""

    def __init__(self, worker_id: str, model: str, own_tokens: int, max_tokens: int) -> None:
        """`max_tokens` is the model's own limit."""
        self._worker_id = worker_id
        self._model = model
        self._own_tokens = own_tokens
        self._max_tokens = max_tokens
        self._others: dict[str, tuple[int, float]] = {}
        self._held = (0, 0.0)

    def on_report(self, report: WorkerReported, now_s: float) -> None:
        """A heartbeat of any worker."""
        if report.worker_id != self._worker_id and report.model == self._model:
            tokens = report.capacity.most_lent_blocks * report.block_tokens
            self._others[report.worker_id] = (tokens, now_s)

    def context_tokens(self, now_s: float) -> int:
        """Prompt and answer."""
        self._others = {
            name: (tokens, heard_s)
            for name, (tokens, heard_s) in self._others.items()
            if now_s - heard_s < _SILENCE_S
        }
        now_tokens = self._own_tokens + sum(tokens for tokens, _ in self._others.values())
        held_tokens, until_s = self._held
        if now_tokens >= held_tokens or now_s >= until_s:
            held_tokens = now_tokens
            self._held = (now_tokens, now_s + _HOLD_S)
        return min(self._max_tokens, held_tokens)
