"""One metric per name and registry, rendered as Prometheus reads it."""

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from shared import metrics


def test_a_name_is_one_metric_per_registry() -> None:
    here, there = CollectorRegistry(), CollectorRegistry()
    metrics.counter("a_total", "A", ("kind",), registry=here).labels("x").inc(2)
    metrics.counter("a_total", "A", ("kind",), registry=here).labels("x").inc()
    metrics.counter("a_total", "A", ("kind",), registry=there).labels("x").inc()
    assert here.get_sample_value("a_total", {"kind": "x"}) == 3
    assert there.get_sample_value("a_total", {"kind": "x"}) == 1


def test_a_name_cannot_be_two_kinds_of_metric() -> None:
    registry = CollectorRegistry()
    metrics.gauge("size_blocks", "Size", registry=registry)
    with pytest.raises(ValueError, match="size_blocks is a Gauge already"):
        metrics.counter("size_blocks", "Size", registry=registry)


def test_rendered_text_is_what_prometheus_reads() -> None:
    registry = CollectorRegistry()
    metrics.counter("steps_total", "Steps", registry=registry).inc(3)
    metrics.gauge("free_blocks", "Free", registry=registry).set(7)
    metrics.histogram("step_seconds", "Step", buckets=(0.1, 1.0), registry=registry).observe(0.5)
    families = {
        family.name: family for family in text_string_to_metric_families(metrics.render(registry).decode())
    }
    assert {sample.name: sample.value for sample in families["steps"].samples}["steps_total"] == 3
    assert families["free_blocks"].samples[0].value == 7
    buckets = {
        s.labels["le"]: s.value for s in families["step_seconds"].samples if s.name.endswith("_bucket")
    }
    assert buckets == {"0.1": 0, "1.0": 1, "+Inf": 1}


def test_who_was_forked_from_one_that_loads_all_services_keeps_its_own_metrics() -> None:
    registry = CollectorRegistry()
    for name in ("kvasir_worker_steps_total", "kvasir_gateway_requests_total", "kvasir_bus_messages_total"):
        metrics.counter(name, "Some", registry=registry)
    metrics.keep_own("gateway", registry=registry)
    text = metrics.render(registry).decode()
    assert "kvasir_worker" not in text
    assert "kvasir_gateway_requests_total 0.0" in text
    assert "kvasir_bus_messages_total 0.0" in text
    again = metrics.counter("kvasir_worker_steps_total", "Some", registry=registry)
    again.inc()
    assert "kvasir_worker_steps_total 1.0" in metrics.render(registry).decode()
