"""The gateway's metrics. Labels that come from clients are bounded in number and form."""

import re

from shared import metrics

MOST_IGNORED_NAMES = 64
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Counters:
    """The counters, gauges and histograms of this process."""

    def __init__(self) -> None:
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
