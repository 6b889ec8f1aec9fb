"""Counts of this process: Prometheus metrics, and figures of each model that are written when scraped.
Labels that come from clients are bounded in number and form. All runs on the event loop's thread."""

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shared import metrics

MOST_IGNORED_NAMES = 64
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class ModelHistogram:
    """Counts by upper bound, and their sum. An observation costs a search and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ModelFigures:
    """Counts and histograms of one model; `vllm_metrics.py` writes them. Times count from acceptance."""

    def __init__(self) -> None:
        self.ttft_s = ModelHistogram(_TTFT_S)
        self.gap_s = ModelHistogram(_TOKEN_S)
        """Between two frames of one answer."""
        self.token_s = ModelHistogram(_TOKEN_S)
        self.request_s, self.decode_s = ModelHistogram(_REQUEST_S), ModelHistogram(_REQUEST_S)
        self.prompt, self.answer = ModelHistogram(_TOKENS), ModelHistogram(_TOKENS)
        self.each_answer, self.most = ModelHistogram(_TOKENS), ModelHistogram(_TOKENS)
        self.choices = ModelHistogram((1, 2, 5, 10, 20))
        self.generated_tokens = self.cached_tokens = 0
        self.reasons: Counter[str] = Counter()


_RECENT_S = 60.0
_MOST_RECENT = 4096


class EndedRequest(NamedTuple):
    """A request that ended. Seconds are None where there are none."""

    at_s: float
    model: str
    status: int
    first_token_s: float | None
    token_s: float | None
    """Between two tokens, on average."""
    whole_s: float | None


class RecentRequests:
    """Requests that ended in the last minute, at most 4,096 of them, for the live page."""

    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=_MOST_RECENT)

    def add(self, ended: EndedRequest) -> None:
        self._ended.append(ended)

    def picture(self, now_s: float) -> list[dict[str, Any]]:
        """Return, by model: counts of requests, refusals (429) and errors (5xx), and p50, p95, p99 of each
        duration in seconds."""
        while self._ended and self._ended[0].at_s < now_s - _RECENT_S:
            self._ended.popleft()
        models: dict[str, list[EndedRequest]] = {}
        for ended in self._ended:
            models.setdefault(ended.model, []).append(ended)
        return [
            {
                "model": model,
                "requests": len(rows),
                "refused": sum(row.status == 429 for row in rows),
                "errors": sum(row.status >= 500 for row in rows),
                "first_token_s": _percentiles(row.first_token_s for row in rows),
                "token_s": _percentiles(row.token_s for row in rows),
                "whole_s": _percentiles(row.whole_s for row in rows),
            }
            for model, rows in sorted(models.items())
        ]


def _percentiles(values: Iterable[float | None]) -> list[float] | None:
    ordered = sorted(value for value in values if value is not None)
    last = len(ordered) - 1
    return [round(ordered[round(last * share)], 6) for share in (0.5, 0.95, 0.99)] if ordered else None


class Counters:
    """The counters, gauges and histograms of this process, and the figures of each of `models`."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self.models = {name: ModelFigures() for name in models}
        self.recent = RecentRequests()
        self.requests = metrics.counter("kvasir_gateway_requests_total", "HTTP requests", ("route", "status"))
        self.disconnects = metrics.counter(
            "kvasir_gateway_disconnects_total", "Clients gone before their answer ended"
        )
        self.active = metrics.gauge("kvasir_gateway_active_sequences", "Sequences in progress")
        self.workers = metrics.gauge("kvasir_gateway_workers", "Workers heard of lately that serve the model")
        self.prompt_tokens = metrics.counter(
            "kvasir_gateway_prompt_tokens_total", "Tokens in accepted prompts"
        )
        self.output_tokens = metrics.counter("kvasir_gateway_output_tokens_total", "Tokens in answers")
        self.first_token_s = metrics.histogram(
            "kvasir_gateway_first_token_seconds", "From the complete request to the first token of its answer"
        )
        self.request_s = metrics.histogram(
            "kvasir_gateway_request_seconds", "From the complete request to the end of its answer"
        )
        self.handovers = metrics.counter(
            "kvasir_gateway_handovers_total", "Attempts given up for a higher one", ("cause",)
        )
        self.stale_deltas = metrics.counter(
            "kvasir_gateway_stale_deltas_total",
            "Token deltas of superseded attempts or of nobody's sequences",
        )
        self.fetches = metrics.counter("kvasir_gateway_fetches_total", "Times missing tokens were asked for")
        self.submits = metrics.counter(
            "kvasir_gateway_submits_total", "Submissions to the scheduler", ("outcome",)
        )
        self.killers = metrics.counter(
            "kvasir_gateway_worker_killers_total", "Requests refused because workers died whenever they ran"
        )
        self._ignored = metrics.counter(
            "kvasir_gateway_ignored_total", "Requests that asked for what has no effect here", ("name",)
        )
        self._ignored_names: set[str] = set()

    def count_ignored(self, name: str) -> None:
        """Count a request with an ignored field. The first names have their own labels; the rest share
        one."""
        if name not in self._ignored_names:
            if len(self._ignored_names) == MOST_IGNORED_NAMES or not _LABEL.fullmatch(name):
                name = "other"
            self._ignored_names.add(name)
        self._ignored.labels(name).inc()
