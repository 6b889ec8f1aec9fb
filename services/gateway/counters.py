"""The gateway's metrics. Labels are few and never come from clients."""

from shared import metrics


class Counters:
    """One set per process."""

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
        self.unknown_fields = metrics.counter(
            "kvasir_gateway_unknown_fields_total", "Unknown fields in request bodies"
        )
