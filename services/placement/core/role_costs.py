"""Estimates the time of a request for a split of workers into prefill and decode, in seconds. Pure.

A step with prompt tokens takes a decode step plus the time of those tokens, and yields one token per answer.
On decode workers a step grows with the context held. Queueing time is that of one M/G/k queue (Sakasegawa's
approximation), whatever the service order. docs/roles.md lists what the model omits.
"""

from dataclasses import dataclass
from math import exp, inf, sqrt

_MOST_BUSY = 0.97
_LINK_BUSY = 0.85
"""Link utilization above which answers stay where they are."""
_HORIZON_S = 30.0
"""Duration of an overload: after this it is assumed to end."""
_PATIENCE = 4.0
_IMPATIENT = 0.1
"""Weight of each second beyond `_PATIENCE`: above 0, so that a worse overload costs more."""
_ROUNDS = 12
_USED_SHARE = 0.9
"""Share of memory that sequences can use."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of a worker, averaged over the fleet."""

    prompt_tokens_per_s: float
    """Plain prompt tokens per second, excluding the time of a decode step."""
    step_s: float
    """Time of a decode step without context."""
    context_token_s: float
    """Time that each token of context adds to it."""
    memory_tokens: int
    step_tokens: int
    """Maximum prompt tokens per step."""
    link_tokens_per_s: float = inf
    """Tokens whose KV one worker can receive per second."""
    preceding_token_s: float = 0.0
    """Time that each preceding token adds to a prompt token."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Arrival rate and mean sizes of requests."""

    requests_per_s: float
    prompt_tokens: float
    """Mean tokens to compute per prompt."""
    prompt_variation: float
    """Squared coefficient of variation of the prompt time."""
    answer_tokens: float
    context_tokens: float
    """Mean tokens of the prompt and half of the answer, cached or not."""
    waiting_tokens: float = 0.0
    """Tokens of prompts that no worker has started."""
    preceding_tokens: float = 0.0
    """Preceding tokens, summed over the computed tokens of a prompt; the mean."""


@dataclass(frozen=True, slots=True)
class RoleSeconds:
    """Estimated times of a mean request under one split."""

    first_token_s: float
    handed_over_share: float
    request_s: float
    """Total time."""
    felt_s: float
    """Total time, with anything beyond `_PATIENCE` times the unloaded time at a low weight."""


def request_s(speeds: Speeds, demand: Demand, workers: int, decoders: int, hand_over_s: float) -> RoleSeconds:
    """Return the times with `decoders` of `workers` for decode only; 0: all do both. `hand_over_s`: time of a
    hand-over, excluding the link."""
    share, token_there_s = _decoded(speeds, demand, decoders)
    share = min(share, _link_share(speeds, demand, decoders))
    waits, prompt_s, token_here_s = _prompts(speeds, demand, workers - decoders, 1.0 - share)
    rest = max(0.0, demand.answer_tokens - 1.0)
    stays_s = goes_s = rest * token_here_s
    if share > 0:
        # While its KV waits for the link, an answer continues on its source.
        late_s = _link_s(speeds, demand, decoders, share) + hand_over_s
        late = min(rest, late_s / token_here_s)
        goes_s = late * token_here_s + (rest - late) * token_there_s
    answer_s = share * goes_s + (1.0 - share) * stays_s
    first_token_s = waits.mean_s + prompt_s
    idle_step_s = speeds.step_s + speeds.context_token_s * demand.context_tokens
    alone_s = _computed_s(speeds, demand) + speeds.step_s + demand.answer_tokens * idle_step_s
    most_s = _PATIENCE * alone_s
    felt_s = share * waits.felt_s(prompt_s + goes_s, most_s)
    felt_s += (1.0 - share) * waits.felt_s(prompt_s + stays_s, most_s)
    return RoleSeconds(first_token_s, share, first_token_s + answer_s, felt_s)


@dataclass(frozen=True, slots=True)
class _Waits:
    """Queueing time: a `share` of requests waits, for an exponentially distributed time."""

    share: float
    mean_s: float
    """Mean over all requests, those without a wait included."""

    def felt_s(self, then_s: float, most_s: float) -> float:
        """Return the mean of the wait and what follows, with time beyond `most_s` at a low weight."""
        whole_s = self.mean_s + then_s
        left_s = most_s - then_s
        if left_s <= 0 or self.mean_s <= 0:
            return min(then_s, most_s) + _IMPATIENT * (whole_s - min(then_s, most_s))
        short_s = self.mean_s * (1.0 - exp(-left_s * self.share / self.mean_s))
        return then_s + short_s + _IMPATIENT * (self.mean_s - short_s)


def _computed_s(speeds: Speeds, demand: Demand) -> float:
    """Return the compute time of a mean prompt, excluding decode steps."""
    alone_s = demand.prompt_tokens / speeds.prompt_tokens_per_s
    return alone_s + demand.preceding_tokens * speeds.preceding_token_s


def _link_share(speeds: Speeds, demand: Demand, decoders: int) -> float:
    """Return the share of answers whose KV the links can carry."""
    sent_s = demand.context_tokens / speeds.link_tokens_per_s
    busy = demand.requests_per_s * sent_s / max(1, decoders)
    return min(1.0, _LINK_BUSY / busy) if busy > 0 else 1.0


def _link_s(speeds: Speeds, demand: Demand, decoders: int, share: float) -> float:
    """Return the time from the first token until the KV has arrived: the link's queue and the last chunk."""
    sent_s = demand.context_tokens / speeds.link_tokens_per_s
    busy = share * demand.requests_per_s * sent_s / decoders
    last_s = sent_s / max(1.0, demand.prompt_tokens / speeds.step_tokens)
    return _wait_s(busy, 1, sent_s, demand.prompt_variation) + last_s


def _decoded(speeds: Speeds, demand: Demand, decoders: int) -> tuple[float, float]:
    """Return the share of answers that `decoders` workers can write, and their time per token."""
    if decoders < 1:
        return 0.0, 0.0
    tokens_per_s = demand.requests_per_s * demand.answer_tokens / decoders
    most_context = speeds.memory_tokens * _USED_SHARE
    at_most_s = speeds.step_s + speeds.context_token_s * most_context
    # Little's law: context = tokens per second * time of a token * context of each.
    each = tokens_per_s * demand.context_tokens
    free = 1.0 - each * speeds.context_token_s
    token_s = speeds.step_s / free if free > 0 else inf
    if each * token_s <= most_context:
        return 1.0, token_s
    return min(1.0, most_context / (each * at_most_s)), at_most_s


def _prompts(
    speeds: Speeds, demand: Demand, workers: int, decoded_share: float
) -> tuple[_Waits, float, float]:
    """Return queueing time, prompt time and token time on `workers` that compute all prompts. They also write
    `decoded_share` of the answers."""
    per_worker = demand.requests_per_s / workers
    prompt_steps = max(1.0, demand.prompt_tokens / speeds.step_tokens)
    chunk_s = _computed_s(speeds, demand) / prompt_steps
    mixed_per_s = per_worker * prompt_steps
    each = per_worker * decoded_share * demand.answer_tokens * demand.context_tokens
    token_s = speeds.step_s
    for _ in range(_ROUNDS):
        context = min(each * token_s, speeds.memory_tokens * _USED_SHARE)
        step_s = speeds.step_s + speeds.context_token_s * context
        mixed_s = step_s + chunk_s
        steps_per_s = mixed_per_s + max(0.0, 1.0 - mixed_per_s * mixed_s) / step_s
        token_s = 0.5 * token_s + 0.5 * min(mixed_s, 1.0 / steps_per_s)
    busy = mixed_per_s * mixed_s
    if decoded_share > 0 and each * token_s > speeds.memory_tokens * _USED_SHARE:
        busy = max(busy, each * token_s / (speeds.memory_tokens * _USED_SHARE))
    prompt_s = prompt_steps * mixed_s
    # If prompts vary more than exponentially, the mean one is rare and routing avoids it.
    typical_s = prompt_s / max(1.0, demand.prompt_variation)
    token_s = _beside_prompts_s(token_s, step_s, mixed_s, busy, typical_s, demand.answer_tokens)
    wait_s = _wait_s(min(busy, _MOST_BUSY), workers, prompt_s, demand.prompt_variation)
    wait_s += max(0.0, busy - _MOST_BUSY) * _HORIZON_S / 4
    mixed_tokens_per_s = speeds.step_tokens / (step_s + chunk_s)
    backlog_s = demand.waiting_tokens / workers / mixed_tokens_per_s
    waiting = float(min(busy, _MOST_BUSY) ** sqrt(2 * (workers + 1)))
    return _Waits(waiting, max(wait_s, backlog_s / 2)), prompt_s, token_s


def _beside_prompts_s(
    mean_s: float, step_s: float, mixed_s: float, busy: float, prompt_s: float, answer_tokens: float
) -> float:
    """Return the time per token beside prompts, which arrive in runs. A short answer falls within a run or
    between two. `mean_s`: time per token of an answer that outlasts many runs."""
    busy = min(busy, _MOST_BUSY)
    row_s = prompt_s / (1.0 - busy)
    short = row_s / (row_s + answer_tokens * mean_s)
    return (1.0 - short) * mean_s + short * (busy * mixed_s + (1.0 - busy) * step_s)


def _wait_s(busy: float, workers: int, service_s: float, variation: float) -> float:
    """Return the mean queueing time of one queue for `workers` servers of utilization `busy`."""
    together = float(busy ** (sqrt(2 * (workers + 1)) - 1))
    return service_s * (1.0 + variation) / 2 * together / (workers * (1.0 - busy))
