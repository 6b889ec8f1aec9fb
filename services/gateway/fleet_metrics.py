"""Metrics of the whole fleet, computed from heartbeats when they are scraped. They use the rows of the live
page, so both agree. Labels are worker names, which operators choose."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from services.gateway.core.fleet_picture import debt_rows, worker_row
from services.gateway.sessions import Sessions


def fleet_metrics(sessions: Sessions) -> Iterator[Metric]:
    """Collector for `shared.metrics.collected`."""
    now_s, reports = sessions.now_s(), sessions.workers.reports()
    wrong = sessions.stack.troubles(now_s)
    if wrong is not None:
        text = "1 where nothing is wrong with the stack, as its supervisor sees it"
        yield GaugeMetricFamily("kvasir_stack_well", text, value=int(not wrong))
        yield GaugeMetricFamily("kvasir_stack_troubles", "Of what is wrong with it", value=len(wrong))
    rows = [worker_row(report, sessions.workers.unheard_s(report.worker_id, now_s)) for report in reports]
    for group, label, name, text in (
        ("blocks", "place", "kv_blocks", "KV of a worker, in its blocks"),
        ("sequences", "state", "sequences", "Sequences that a worker holds"),
        ("hits", "tier", "prefix_blocks", "Blocks of prompts, by where found"),
    ):
        family = GaugeMetricFamily(f"kvasir_worker_{name}", text, labels=["worker", label])
        for row in rows:
            for key, value in row[group].items():
                family.add_metric([row["id"], key], value)
        yield family
    for field, name, text in (
        ("busy", "busy_share", "Of the last while, in which it computed"),
        ("swapped_layers", "swapped_layers", "Layers whose KV is on the host"),
    ):
        family = GaugeMetricFamily(f"kvasir_worker_{name}", text, labels=["worker"])
        for row in rows:
            family.add_metric([row["id"]], row[field])
        yield family
    labels = ["creditor", "debtor", "memory"]
    owed = GaugeMetricFamily("kvasir_ledger_debt_blocks", "Blocks that a worker has lent", labels=labels)
    for debt in debt_rows(reports):
        pair = [debt["creditor"], debt["debtor"]]
        owed.add_metric([*pair, "device"], debt["blocks"])
        owed.add_metric([*pair, "host"], debt["host_blocks"])
    yield owed
    scheduler = sessions.scheduler
    for name, value, text in (
        ("queued", scheduler.said("queued"), "Sequences that no worker has yet"),
        ("running", scheduler.said("running"), "Sequences that a worker has"),
        ("preemptions", scheduler.said("preemptions"), "Preemptions in the present schedulers' terms"),
    ):
        yield GaugeMetricFamily(f"kvasir_fleet_{name}", text, value=value)
    text = "Tokens of prompts that are over: placed, expected in caches, found there, wrongly expected"
    hits = GaugeMetricFamily("kvasir_fleet_prefix_tokens", text, labels=["kind"])
    for kind, tokens in scheduler.hit_tokens.items():
        hits.add_metric([kind], tokens)
    yield hits
