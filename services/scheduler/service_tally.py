"""What was served, for metrics and `status`: to each tenant, and of what placement had foreseen.

The queue charges by its own account (`policy/tenants.py`); this one is in units that people bill by. Bounded:
of more tenants than it names, those that come later are counted together.
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
    """One tenant's, since the term began."""

    sequences: int = 0
    computed_tokens: int = 0
    """Of prompts, those not found in a cache."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    kv_token_s: float = 0.0
    """Tokens of KV, times the seconds for which they were held."""


class ServiceTally:
    """By tenant."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        labels = ("tenant", "kind")
        self._tokens = metrics.counter("kvasir_scheduler_tenant_tokens_total", "Tokens served", labels)
        self._kv = metrics.counter(
            "kvasir_scheduler_tenant_kv_token_seconds_total", "Tokens of KV times seconds held", ("tenant",)
        )

    def count(self, left: SequenceLeft) -> None:
        """A sequence is over. One that never started was served nothing."""
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
        """A row for each that was served or is here; `charged_s`: what queues count, lifted; `present`: how
        many sequences of a name wait (False) or are at a worker (True)."""
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
    """Where a tenant is counted: of its own as long as there is room."""
    name = tenant or "-"
    return _OTHERS if name not in rows and len(rows) >= _MOST_TENANTS else name


class HitTally:
    """What placement expected prompts to find in caches, against what they found."""

    def __init__(self) -> None:
        self.prompt_tokens = self.expected_tokens = self.found_tokens = self.error_tokens = 0
        """Of sequences that were placed and started."""

    def count(self, left: SequenceLeft) -> None:
        """A sequence is over."""
        if left.expected_tokens is None or left.worker_id is None or left.held_s <= 0:
            return
        found_tokens = min(left.cached_tokens, left.prompt_tokens)
        expected_tokens = min(left.expected_tokens, left.prompt_tokens)
        self.prompt_tokens += left.prompt_tokens
        self.expected_tokens += expected_tokens
        self.found_tokens += found_tokens
        self.error_tokens += abs(expected_tokens - found_tokens)

    def describe(self) -> dict[str, int]:
        """The counts of this term."""
        return {
            "placed_prompt_tokens": self.prompt_tokens,
            "hits_expected_tokens": self.expected_tokens,
            "hits_found_tokens": self.found_tokens,
            "hits_error_tokens": self.error_tokens,
        }
