"""Prometheus metrics: one registry per process, metrics created on first use. Labels have few values (message
kinds, error codes); ids are never labels."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from shared.subjects import SERVICES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REGISTRY = CollectorRegistry()
"""Default registry of the process."""
ProcessCollector(registry=REGISTRY)

_W = TypeVar("_W", bound=MetricWrapperBase)
_made: WeakKeyDictionary[CollectorRegistry, dict[str, MetricWrapperBase]] = WeakKeyDictionary()


def _once(
    kind: type[_W],
    name: str,
    documentation: str,
    labels: Sequence[str] = (),
    *,
    registry: CollectorRegistry | None = None,
    **more: Any,
) -> _W:
    """Return the metric of that name, created once. Raise ValueError if it is of another kind."""
    target = registry or REGISTRY
    made = _made.setdefault(target, {})
    if name not in made:
        made[name] = kind(name, documentation, labels, registry=target, **more)
    metric = made[name]
    if not isinstance(metric, kind):
        raise ValueError(f"{name} is a {type(metric).__name__} already")
    return metric


counter = partial(_once, Counter)
"""`name` ends in `_total`."""
gauge = partial(_once, Gauge)
histogram = partial(_once, Histogram, buckets=SECONDS_BUCKETS)
"""`name` ends in its unit, such as `_seconds`."""


class _Source:
    """Collector that calls the most recently set function."""

    def __init__(self) -> None:
        self.collect_now: Callable[[], Iterable[Metric]] = tuple

    def collect(self) -> Iterable[Metric]:
        return self.collect_now()


_sources: WeakKeyDictionary[CollectorRegistry, dict[str, _Source]] = WeakKeyDictionary()


def collected(
    name: str, collect: Callable[[], Iterable[Metric]], *, registry: CollectorRegistry | None = None
) -> None:
    """Call `collect` whenever metrics are read. A later call with the same `name` replaces it."""
    target = registry or REGISTRY
    known = _sources.setdefault(target, {})
    if name not in known:
        known[name] = _Source()
        target.register(known[name])
    known[name].collect_now = collect


def keep_own(service: str, *, registry: CollectorRegistry | None = None) -> None:
    """Remove metrics of other services (`kvasir_<service>_…`) from a process forked after loading them."""
    target = registry or REGISTRY
    made = _made.get(target, {})
    for name in list(made):
        owner = name.split("_")[1]
        if owner in SERVICES and owner != service:
            target.unregister(made.pop(name))


def render(registry: CollectorRegistry | None = None) -> bytes:
    """Return all metrics in Prometheus text format (`CONTENT_TYPE`)."""
    return generate_latest(registry or REGISTRY)
