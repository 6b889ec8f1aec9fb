"""Service per tenant and accuracy of expected cache hits, for metrics and `status`.

Units are those of billing; the queue charges by its own account (`policy/tenants.py`). Beyond a maximum
number of tenants, later ones are counted together.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from services.scheduler.core.effects import SequenceLeft
from shared import metrics

_MOST_TENANTS = 256
_OTHERS = "(others)"


@dataclass(slots=True)
class Service:
    """Service of one tenant since the term began."""

    sequences: int = 0
    computed_tokens: int = 0
    """Prompt tokens not found in a cache."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    kv_token_s: float = 0.0
    """KV tokens times the seconds for which they were held."""


class ServiceTally:
    """Service by tenant."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        labels = ("tenant", "kind")
        self._tokens = metrics.counter("kvasir_scheduler_tenant_tokens_total", "Tokens served", labels)
        self._kv = metrics.counter(
            "kvasir_scheduler_tenant_kv_token_seconds_total", "Tokens of KV times seconds held", ("tenant",)
        )

    def count(self, left: SequenceLeft) -> None:
        """Count a finished sequence; one that never started got no service."""
        if left.worker_id is None or left.held_s <= 0:
            return
        name = _row_of(left.tenant.name, self._services)
        service = self._services.setdefault(name, Service())
        generated_tokens = left.generated_tokens or 0
        cached_tokens = min(left.cached_tokens, left.prompt_tokens)
        kv_token_s = (left.prompt_tokens + generated_tokens / 2) * left.held_s
        service.sequences += 1
        service.computed_tokens += left.prompt_tokens - cached_tokens
        service.cached_tokens += cached_tokens
        service.generated_tokens += generated_tokens
        service.kv_token_s += kv_token_s
        self._tokens.labels(name, "computed").inc(left.prompt_tokens - cached_tokens)
        self._tokens.labels(name, "cached").inc(cached_tokens)
        self._tokens.labels(name, "generated").inc(generated_tokens)
        self._kv.labels(name).inc(kv_token_s)

    def describe(
        self, charged_s: Iterable[tuple[str, float]], present: Iterable[tuple[tuple[str, bool], int]] = ()
    ) -> list[dict[str, Any]]:
        """Return a row per tenant that was served or is present. `charged_s`: queue counters. `present`:
        sequences by tenant and whether a worker holds them."""
        counters: dict[str, float] = {}
        for name, counter_s in charged_s:
            counters[name or "-"] = counters.get(name or "-", 0.0) + counter_s
        here: Counter[tuple[str, bool]] = Counter()
        named = dict(self._services)
        for (tenant, is_held), count in present:
            name = _row_of(tenant, named)
            named.setdefault(name, Service())
            here[name, is_held] += count
        return [
            {
                "tenant": name,
                "waiting": here[name, False],
                "running": here[name, True],
                "sequences": service.sequences,
                "computed_tokens": service.computed_tokens,
                "cached_tokens": service.cached_tokens,
                "generated_tokens": service.generated_tokens,
                "kv_token_s": round(service.kv_token_s, 1),
                "charged_s": round(counters.get(name, 0.0), 3),
            }
            for name, service in sorted(named.items())
        ]


def _row_of(tenant: str, rows: Collection[str]) -> str:
    """Return the tenant's row name, a shared one if there are too many rows."""
    name = tenant or "-"
    return _OTHERS if name not in rows and len(rows) >= _MOST_TENANTS else name


class HitTally:
    """Prompt tokens that placement expected in caches, and those found."""

    def __init__(self) -> None:
        self.prompt_tokens = self.expected_tokens = self.found_tokens = self.error_tokens = 0
        """Totals over placed sequences that started."""

    def count(self, left: SequenceLeft) -> None:
        """Count a finished sequence."""
        if left.expected_tokens is None or left.worker_id is None or left.held_s <= 0:
            return
        found_tokens = min(left.cached_tokens, left.prompt_tokens)
        expected_tokens = min(left.expected_tokens, left.prompt_tokens)
        self.prompt_tokens += left.prompt_tokens
        self.expected_tokens += expected_tokens
        self.found_tokens += found_tokens
        self.error_tokens += abs(expected_tokens - found_tokens)

    def describe(self) -> dict[str, int]:
        """Return the counts of this term."""
        return {
            "placed_prompt_tokens": self.prompt_tokens,
            "hits_expected_tokens": self.expected_tokens,
            "hits_found_tokens": self.found_tokens,
            "hits_error_tokens": self.error_tokens,
        }
