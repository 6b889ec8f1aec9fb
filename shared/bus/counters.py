"""Metrics of the bus. Labelled children are looked up once to keep the hot path short."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared import metrics


class BusCounters:
    """Bus metrics of one process; several buses on one registry share them."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._messages = metrics.counter(
            "kvasir_bus_messages_total", "Messages", ("direction", "kind"), registry=registry
        )
        self._errors = metrics.counter(
            "kvasir_bus_errors_total",
            "Errors by wire code; side is handler, caller or connection",
            ("side", "code"),
            registry=registry,
        )
        self._seconds = metrics.histogram(
            "kvasir_bus_handler_seconds", "Time in asynchronous handlers", ("kind",), registry=registry
        )
        self._slow = metrics.counter(
            "kvasir_bus_slow_consumer_drops_total",
            "Messages dropped because a handler did not keep up",
            ("kind",),
            registry=registry,
        )
        self.reconnects = metrics.counter(
            "kvasir_bus_reconnects_total", "Connections regained", registry=registry
        )
        self.connected = metrics.gauge("kvasir_bus_connected", "1 while connected to NATS", registry=registry)

        self._received: dict[type, Counter] = {}
        self._sent: dict[type, Counter] = {}

    def received(self, kind: type) -> Counter:
        """Counter of received messages of that kind."""
        return self._received.get(kind) or self._received.setdefault(
            kind, self._messages.labels("in", kind.__name__)
        )

    def sent(self, kind: type) -> Counter:
        """Counter of sent messages of that kind."""
        return self._sent.get(kind) or self._sent.setdefault(
            kind, self._messages.labels("out", kind.__name__)
        )

    def handler_seconds(self, kind: type) -> Histogram:
        """Time in asynchronous handlers for that kind."""
        child: Histogram = self._seconds.labels(kind.__name__)
        return child

    def error(self, side: str, code: str) -> None:
        """Count an error; `side` is handler, caller or connection."""
        self._errors.labels(side, code).inc()

    def dropped(self, kind: str) -> None:
        """Count a message dropped by a slow consumer."""
        self._slow.labels(kind).inc()
