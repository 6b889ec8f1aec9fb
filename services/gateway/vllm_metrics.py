"""Metrics of this fleet under vLLM's names, for dashboards, autoscalers and endpoint pickers.

One series per model (`engine="0"`): readers see the fleet as one server. Requests are counted at this
gateway; sequences, KV and preemptions come from heartbeats. docs/metrics.md defines each name. All runs on
the event loop's thread, without locks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from services.gateway.core.peers import SchedulerView, WorkerTable
from shared.messages.reports import STEP_TOKEN_BOUNDS, WAIT_BOUNDS_S, SequenceState

TTFT_S: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
TOKEN_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
REQUEST_S: Final = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)
TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
CHOICES: Final = (1, 2, 5, 10, 20)
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": (TTFT_S, "From the complete request to the first token"),
    "inter_token_latency_seconds": (TOKEN_S, "Between two of an answer's frames of tokens"),
    "time_per_output_token_seconds": (TOKEN_S, "The same, under its former name"),
    "request_time_per_output_token_seconds": (TOKEN_S, "After the first token, by request"),
    "e2e_request_latency_seconds": (REQUEST_S, "From the complete request to the end of its answer"),
    "request_decode_time_seconds": (REQUEST_S, "From the first token to the end"),
    "request_prompt_tokens": (TOKENS, "Of prompts"),
    "request_generation_tokens": (TOKENS, "Of answers"),
    "request_max_num_generation_tokens": (TOKENS, "Of a request's longest answer"),
    "request_params_n": (CHOICES, "Choices asked for"),
    "request_params_max_tokens": (TOKENS, "Longest answer asked for"),
}
_COUNTERS: Final = {
    "prompt_tokens": "In prompts of finished requests",
    "generation_tokens": "In answers, as they come",
    "prefix_cache_queries": "Tokens of prompts that were looked for in prefix caches",
    "prefix_cache_hits": "Tokens of prompts that were found there",
}


class VllmHistogram:
    """Histogram; an observation costs a search and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    @property
    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative buckets, as Prometheus expects them, and the sum."""
        return _cumulated(self.bounds, self._counts), self._sum


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))


class ModelFigures:
    """Counts and histograms of one model."""

    def __init__(self) -> None:
        self.histograms = {name: VllmHistogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        """Answers by vLLM's finish reason."""

    def on_gap(self, gap_s: float) -> None:
        """Observe the time between two frames of one answer."""
        self.histograms["inter_token_latency_seconds"].observe(gap_s)
        self.histograms["time_per_output_token_seconds"].observe(gap_s)

    def on_request(
        self,
        *,
        took_s: float,
        first_token_s: float | None,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int,
        choices: int,
        most_tokens: int,
        reasons: Iterable[str],
    ) -> None:
        """Observe an ended request; times count from its acceptance."""
        seen = {
            "e2e_request_latency_seconds": took_s,
            "request_prompt_tokens": prompt_tokens,
            "request_generation_tokens": output_tokens,
            "request_max_num_generation_tokens": output_tokens / max(1, choices),
            "request_params_n": choices,
            "request_params_max_tokens": most_tokens,
        }
        if first_token_s is not None:
            decode_s = took_s - first_token_s
            seen |= {"time_to_first_token_seconds": first_token_s, "request_decode_time_seconds": decode_s}
            if output_tokens > choices:
                seen["request_time_per_output_token_seconds"] = decode_s / (output_tokens / choices - 1)
        for name, value in seen.items():
            self.histograms[name].observe(value)
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["prefix_cache_queries"] += prompt_tokens
        self.counts["prefix_cache_hits"] += cached_tokens
        self.reasons.update(reason if reason in ("stop", "length") else "abort" for reason in reasons)


class VllmMetrics:
    """Metrics of all models; a collector for `shared.metrics.collected`."""

    def __init__(self, models: Sequence[str], workers: WorkerTable, scheduler: SchedulerView) -> None:
        self._models = {name: ModelFigures() for name in models}
        self._workers = workers
        self._scheduler = scheduler

    def of(self, model: str) -> ModelFigures:
        """Return the model's figures. Raises KeyError for an unknown model."""
        return self._models[model]

    def collect(self) -> Iterator[Metric]:
        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for model, figures in self._models.items():
                family.add_metric([model, "0"], figures.counts[name])
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Answers, by why they ended", labels=[*_LABELS, "finished_reason"]
        )
        for model, figures in self._models.items():
            for reason in ("stop", "length", "abort"):
                success.add_metric([model, "0", reason], figures.reasons[reason])
        yield success
        for name, (_, text) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for model, figures in self._models.items():
                buckets, total = figures.histograms[name].buckets
                histogram.add_metric([model, "0"], buckets, total)
            yield histogram
        yield from self._of_steps()
        yield from self._of_fleet()

    def _of_steps(self) -> Iterator[Metric]:
        """Yield the metrics of workers' steps."""
        iterations = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS)
        prefills = HistogramMetricFamily(
            "vllm:request_prefill_time_seconds",
            "From its first plan to the first token",
            labels=_LABELS,
        )
        inferences = HistogramMetricFamily(
            "vllm:request_inference_time_seconds",
            "From its first plan to the last token",
            labels=_LABELS,
        )
        for model, sums in self._workers.steps.items():
            for family, bounds, counts, total in (
                (iterations, STEP_TOKEN_BOUNDS, sums.by_tokens, float(sums.tokens)),
                (prefills, WAIT_BOUNDS_S, sums.by_prefill, sums.prefill_s),
                (inferences, WAIT_BOUNDS_S, sums.by_inference, sums.inference_s),
            ):
                family.add_metric([model, "0"], _cumulated(bounds, counts), total)
        yield from (iterations, prefills, inferences)

    def _of_fleet(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences in batches", labels=_LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait", labels=_LABELS)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV in use; 1 is all", labels=_LABELS)
        former = GaugeMetricFamily("vllm:gpu_cache_usage_perc", "The same, formerly", labels=_LABELS)
        blocks = GaugeMetricFamily(
            "vllm:cache_config_info", "KV of all workers", labels=[*_LABELS, "block_size", "num_gpu_blocks"]
        )
        queued_at = self._scheduler.queued_by_model
        for model in self._models:
            reports = [report for report in self._workers.reports() if report.model == model]
            states = Counter(sequence.state for report in reports for sequence in report.sequences)
            computing = states[SequenceState.DECODING] + states[SequenceState.PREFILLING]
            running.add_metric([model, "0"], computing)
            waiting.add_metric([model, "0"], queued_at.get(model, 0) + states[SequenceState.WAITING])
            total = sum(report.capacity.total_blocks * report.block_tokens for report in reports)
            idle = sum(
                (report.capacity.free_blocks + report.capacity.evictable_blocks) * report.block_tokens
                for report in reports
            )
            for gauge in (usage, former):
                gauge.add_metric([model, "0"], max(0, total - idle) / total if total else 0.0)
            if reports:
                size = reports[0].block_tokens
                blocks.add_metric([model, "0", str(size), str(total // size)], 1)
        yield from (running, waiting, usage, former, blocks)
        yield from self._of_scheduler()

    def _of_scheduler(self) -> Iterator[Metric]:
        """Yield the scheduler's metrics, under the first model: they are not split by model."""
        model = next(iter(self._models))
        preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences preempted", labels=_LABELS)
        preempted.add_metric([model, "0"], self._scheduler.preemptions_total)
        yield preempted
        queue = HistogramMetricFamily(
            "vllm:request_queue_time_seconds", "From acceptance to the first plan", labels=_LABELS
        )
        buckets = _cumulated(WAIT_BOUNDS_S, self._scheduler.waits)
        queue.add_metric([model, "0"], buckets, self._scheduler.waited_s)
        yield queue


_LABELS = ["model_name", "engine"]
