"""Metrics of the whole fleet, computed from heartbeats when they are scraped. They use the rows of the live
page, so both agree. Labels are worker names, which operators choose."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.gateway.core.fleet_picture import debt_rows, worker_row
from services.gateway.sessions import Sessions
from shared.clock import Clock


class FleetMetrics:
    """Collector for `shared.metrics.collected`."""

    def __init__(self, sessions: Sessions, now_s: Clock) -> None:
        self._workers = sessions.workers
        self._scheduler = sessions.scheduler
        self._stack = sessions.stack
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        wrong = self._stack.troubles(self._now_s())
        if wrong is not None:
            text = "1 where nothing is wrong with the stack, as its supervisor sees it"
            yield GaugeMetricFamily("kvasir_stack_well", text, value=int(not wrong))
            yield GaugeMetricFamily("kvasir_stack_troubles", "Of what is wrong with it", value=len(wrong))
        now_s, reports = self._now_s(), self._workers.reports()
        rows = [worker_row(report, self._workers.unheard_s(report.worker_id, now_s)) for report in reports]
        yield _by(rows, "blocks", "place", "kvasir_worker_kv_blocks", "KV of a worker, in its blocks")
        yield _by(rows, "sequences", "state", "kvasir_worker_sequences", "Sequences that a worker holds")
        yield _by(rows, "hits", "tier", "kvasir_worker_prefix_blocks", "Blocks of prompts, by where found")
        yield _plain(rows, "busy", "kvasir_worker_busy_share", "Of the last while, in which it computed")
        yield _plain(rows, "swapped_layers", "kvasir_worker_swapped_layers", "Layers whose KV is on the host")
        owed = GaugeMetricFamily(
            "kvasir_ledger_debt_blocks",
            "Blocks that a worker has lent",
            labels=["creditor", "debtor", "memory"],
        )
        for debt in debt_rows(reports):
            pair = [debt["creditor"], debt["debtor"]]
            owed.add_metric([*pair, "device"], debt["blocks"])
            owed.add_metric([*pair, "host"], debt["host_blocks"])
        yield owed
        scheduler = self._scheduler
        for name, value, text in (
            ("queued", scheduler.said.queued, "Sequences that no worker has yet"),
            ("running", scheduler.said.running, "Sequences that a worker has"),
            ("preemptions", scheduler.said.preemptions, "Preemptions in the present scheduler's term"),
        ):
            yield GaugeMetricFamily(f"kvasir_fleet_{name}", text, value=value)
        text = "Tokens of prompts that are over: placed, expected in caches, found there, wrongly expected"
        hits = GaugeMetricFamily("kvasir_fleet_prefix_tokens", text, labels=["kind"])
        for kind, tokens in scheduler.hit_tokens.items():
            hits.add_metric([kind], tokens)
        yield hits


def _by(rows: list[dict[str, Any]], group: str, label: str, name: str, text: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["worker", label])
    for row in rows:
        for key, value in row[group].items():
            family.add_metric([row["id"], key], value)
    return family


def _plain(rows: list[dict[str, Any]], field: str, name: str, text: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["worker"])
    for row in rows:
        family.add_metric([row["id"]], row[field])
    return family
