"""Metrics of this fleet under vLLM's names, for dashboards, autoscalers and endpoint pickers. One series per
model (`engine="0"`): readers see the fleet as one server. Requests are counted at this gateway; sequences, KV
and preemptions come from heartbeats. docs/metrics.md defines each name."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from services.gateway.core.views import ShardViews, WorkerTable
from services.gateway.sessions import Sessions
from shared.messages.reports import STEP_TOKEN_BOUNDS, WAIT_BOUNDS_S, SequenceState

_LABELS = ["model_name", "engine"]
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft_s", "From the complete request to the first token"),
    "inter_token_latency_seconds": ("gap_s", "Between two of an answer's frames of tokens"),
    "time_per_output_token_seconds": ("gap_s", "The same, under its former name"),
    "request_time_per_output_token_seconds": ("token_s", "After the first token, by request"),
    "e2e_request_latency_seconds": ("request_s", "From the complete request to the end of its answer"),
    "request_decode_time_seconds": ("decode_s", "From the first token to the end"),
    "request_prompt_tokens": ("prompt", "Of prompts"),
    "request_generation_tokens": ("answer", "Of answers"),
    "request_max_num_generation_tokens": ("each_answer", "Of a request's longest answer"),
    "request_params_n": ("choices", "Choices asked for"),
    "request_params_max_tokens": ("most", "Longest answer asked for"),
}


def vllm_metrics(sessions: Sessions) -> Iterator[Metric]:
    """Collector for `shared.metrics.collected`."""
    models = sessions.counters.models
    for name, text in (
        ("prompt_tokens", "In prompts of finished requests"),
        ("generation_tokens", "In answers, as they come"),
        ("prefix_cache_queries", "Tokens of prompts that were looked for in prefix caches"),
        ("prefix_cache_hits", "Tokens of prompts that were found there"),
    ):
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for model, figures in models.items():
            counts = {
                "generation_tokens": figures.generated_tokens,
                "prefix_cache_hits": figures.cached_tokens,
            }
            family.add_metric([model, "0"], counts.get(name, figures.prompt.sum))
        yield family
    labels = [*_LABELS, "finished_reason"]
    success = CounterMetricFamily("vllm:request_success", "Answers, by why they ended", labels=labels)
    for model, figures in models.items():
        ends = {reason: figures.reasons[reason] for reason in ("stop", "length")}
        ends["abort"] = figures.reasons.total() - sum(ends.values())
        for reason, count in ends.items():
            success.add_metric([model, "0", reason], count)
    yield success
    for name, (attribute, text) in _HISTOGRAMS.items():
        written = _histogram(name, text)
        for model, figures in models.items():
            found = getattr(figures, attribute)
            written.add_metric([model, "0"], _cumulated(found.bounds, found.counts), found.sum)
        yield written
    yield from _of_steps(sessions.workers)
    yield from _of_fleet(sessions)
    yield from _of_scheduler(next(iter(models)), sessions.scheduler)


def _of_steps(workers: WorkerTable) -> Iterator[Metric]:
    iterations = _histogram("iteration_tokens_total", "Tokens of a step")
    prefills = _histogram("request_prefill_time_seconds", "From its first plan to the first token")
    inferences = _histogram("request_inference_time_seconds", "From its first plan to the last token")
    for model, sums in workers.steps.items():
        for family, bounds, counts, total in (
            (iterations, STEP_TOKEN_BOUNDS, sums.by_tokens, float(sums.tokens)),
            (prefills, WAIT_BOUNDS_S, sums.by_prefill, sums.prefill_s),
            (inferences, WAIT_BOUNDS_S, sums.by_inference, sums.inference_s),
        ):
            family.add_metric([model, "0"], _cumulated(bounds, counts), total)
    yield from (iterations, prefills, inferences)


def _of_fleet(sessions: Sessions) -> Iterator[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Sequences in batches", labels=_LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait", labels=_LABELS)
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV in use; 1 is all", labels=_LABELS)
    former = GaugeMetricFamily("vllm:gpu_cache_usage_perc", "The same, formerly", labels=_LABELS)
    labels = [*_LABELS, "block_size", "num_gpu_blocks"]
    blocks = GaugeMetricFamily("vllm:cache_config_info", "KV of all workers", labels=labels)
    queued_at = sessions.scheduler.queued_by_model
    for model in sessions.counters.models:
        reports = [report for report in sessions.workers.reports() if report.model == model]
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


def _of_scheduler(model: str, scheduler: ShardViews) -> Iterator[Metric]:
    """Yield the scheduler's metrics, under the first model: they are not split by model."""
    preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences preempted", labels=_LABELS)
    preempted.add_metric([model, "0"], scheduler.total("preemptions_total"))
    yield preempted
    queue = _histogram("request_queue_time_seconds", "From acceptance to the first plan")
    queue.add_metric([model, "0"], _cumulated(WAIT_BOUNDS_S, scheduler.waits), scheduler.total("waited_s"))
    yield queue


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects them."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
