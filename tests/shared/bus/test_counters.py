"""What is counted ends up in the registry under the documented names."""

from prometheus_client import CollectorRegistry

from shared.bus.counters import BusCounters
from shared.messages.base import Empty


def test_two_buses_of_one_process_share_their_metrics() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        counters = BusCounters(registry)
        counters.received(Empty).inc()
        counters.sent(Empty).inc()
        counters.sent(Empty).inc()
        counters.handler_seconds(Empty).observe(0.2)
        counters.error("caller", "no_responder")
        counters.dropped("Empty")
        counters.reconnects.inc()
    expected = {
        ("kvasir_bus_messages_total", (("direction", "in"), ("kind", "Empty"))): 2,
        ("kvasir_bus_messages_total", (("direction", "out"), ("kind", "Empty"))): 4,
        ("kvasir_bus_handler_seconds_count", (("kind", "Empty"),)): 2,
        ("kvasir_bus_errors_total", (("side", "caller"), ("code", "no_responder"))): 2,
        ("kvasir_bus_slow_consumer_drops_total", (("kind", "Empty"),)): 2,
        ("kvasir_bus_reconnects_total", ()): 2,
    }
    for (name, labels), value in expected.items():
        assert registry.get_sample_value(name, dict(labels)) == value, name
