"""What a request takes where so many workers compute prompts and so many write answers, in seconds.

A step with prompts in it takes a decoding step and the time of its prompt tokens; who writes an answer there
gets one token of it. A worker that only writes answers takes decoding steps, which grow with the context it
holds. From what workers measured and what arrives follow the wait for a worker, the time of a prompt, and
the time of each token, here and there, and where memory or computation would not do.

    8 workers, prompts of 2,000 tokens and answers of 30, 12 a second, steps of 1,024 prompt tokens in 0.17 s:
    all of them doing both, three steps in four have a prompt in them, and a token takes 0.08 s; six of them
    for prompts are busy for the same share, and a token takes 0.03 s at the other two.

Waits are those of one line before several servers (Sakasegawa's approximation of M/G/k); who is served first
is not looked at. Pure. What it leaves out is in docs/roles.md.
"""

from dataclasses import dataclass
from math import exp, inf, sqrt

_MOST_BUSY = 0.97
_LINK_BUSY = 0.85
"""Beyond, answers stay where they are rather than wait."""
_HORIZON_S = 30.0
"""What comes in so long is worked off, or waits: an overload is not taken to last for ever."""
_PATIENCE = 4.0
_IMPATIENT = 0.1
"""Of each second beyond that, so much counts: else nothing would tell one overload from a worse one."""
_ROUNDS = 12
_USED_SHARE = 0.9
"""Of memory that sequences can use."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of a worker, averaged over those there are."""

    prompt_tokens_per_s: float
    """Beside a decoding step's own time, and without any that precede them."""
    step_s: float
    """A decoding step without any context."""
    context_token_s: float
    """What each token of context adds to it."""
    memory_tokens: int
    step_tokens: int
    """Prompt tokens of one step at most."""
    link_tokens_per_s: float = inf
    """Tokens whose KV one worker can take in."""
    preceding_token_s: float = 0.0
    """What attention to each token before it adds to one of a prompt."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives."""

    requests_per_s: float
    prompt_tokens: float
    """To be computed, the mean."""
    prompt_variation: float
    """Of the time they take: variance over the square of the mean."""
    answer_tokens: float
    context_tokens: float
    """Prompt and half of the answer, cached or not."""
    waiting_tokens: float = 0.0
    """Of prompts that no worker has begun."""
    preceding_tokens: float = 0.0
    """Before each token that is computed of a prompt, summed up; the mean."""


@dataclass(frozen=True, slots=True)
class RoleSeconds:
    """Of a mean request under one split."""

    first_token_s: float
    token_s: float
    """Between two tokens of the answer."""
    handed_over_share: float
    request_s: float
    """All of it."""
    felt_s: float
    """The same, where what takes longer than `_PATIENCE` times as long as alone counts hardly more."""


def request_s(speeds: Speeds, demand: Demand, workers: int, decoders: int, hand_over_s: float) -> RoleSeconds:
    """With `decoders` of `workers` for answers alone; 0: all do both. `hand_over_s`: beside the link's."""
    share, token_there_s = _decoded(speeds, demand, decoders)
    share = min(share, _link_share(speeds, demand, decoders))
    waits, prompt_s, token_here_s = _prompts(speeds, demand, workers - decoders, 1.0 - share)
    rest = max(0.0, demand.answer_tokens - 1.0)
    stays_s = goes_s = rest * token_here_s
    if share > 0:
        # While its KV waits for the link, an answer goes on where it is.
        late_s = _link_s(speeds, demand, decoders, share) + hand_over_s
        late = min(rest, late_s / token_here_s)
        goes_s = late * token_here_s + (rest - late) * token_there_s
    answer_s = share * goes_s + (1.0 - share) * stays_s
    first_token_s = waits.mean_s + prompt_s
    most_s = _PATIENCE * _alone_s(speeds, demand)
    felt_s = share * waits.felt_s(prompt_s + goes_s, most_s)
    felt_s += (1.0 - share) * waits.felt_s(prompt_s + stays_s, most_s)
    return RoleSeconds(first_token_s, answer_s / max(1.0, rest), share, first_token_s + answer_s, felt_s)


@dataclass(frozen=True, slots=True)
class _Waits:
    """For a worker: so many do, and then for an exponentially distributed time."""

    share: float
    mean_s: float
    """Of all, also those that do not."""

    def felt_s(self, then_s: float, most_s: float) -> float:
        """The mean of the wait and what follows, where what is beyond `most_s` counts little."""
        whole_s = self.mean_s + then_s
        left_s = most_s - then_s
        if left_s <= 0 or self.mean_s <= 0:
            return min(then_s, most_s) + _IMPATIENT * (whole_s - min(then_s, most_s))
        short_s = self.mean_s * (1.0 - exp(-left_s * self.share / self.mean_s))
        return then_s + short_s + _IMPATIENT * (self.mean_s - short_s)


def _alone_s(speeds: Speeds, demand: Demand) -> float:
    """A mean request at a worker that has no other."""
    prompt_s = _computed_s(speeds, demand) + speeds.step_s
    return prompt_s + demand.answer_tokens * (speeds.step_s + speeds.context_token_s * demand.context_tokens)


def _computed_s(speeds: Speeds, demand: Demand) -> float:
    """Of a mean prompt, beside a step's own time."""
    alone_s = demand.prompt_tokens / speeds.prompt_tokens_per_s
    return alone_s + demand.preceding_tokens * speeds.preceding_token_s


def _link_share(speeds: Speeds, demand: Demand, decoders: int) -> float:
    """Of the answers, those whose KV the links carry."""
    sent_s = demand.context_tokens / speeds.link_tokens_per_s
    busy = demand.requests_per_s * sent_s / max(1, decoders)
    return min(1.0, _LINK_BUSY / busy) if busy > 0 else 1.0


def _link_s(speeds: Speeds, demand: Demand, decoders: int, share: float) -> float:
    """From the first token until the KV is there: the line before a worker's link, and the last chunk."""
    sent_s = demand.context_tokens / speeds.link_tokens_per_s
    busy = share * demand.requests_per_s * sent_s / decoders
    last_s = sent_s / max(1.0, demand.prompt_tokens / speeds.step_tokens)
    return _wait_s(busy, 1, sent_s, demand.prompt_variation) + last_s


def _decoded(speeds: Speeds, demand: Demand, decoders: int) -> tuple[float, float]:
    """The share of answers that so many workers can write, and how long a token takes there."""
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
    """The wait for a worker, the time of a prompt, and that of a token there, at each of so many workers that
    compute all prompts and write that share of the answers."""
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
    # Where prompts vary more than exponentially the mean one is rare, and routes lead around it.
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
    """A token's time, given that prompts come in a row: an answer that is short beside such a row is written
    during it, or is not, and most of the time there is one. `mean_s`: of an answer that outlasts many."""
    busy = min(busy, _MOST_BUSY)
    row_s = prompt_s / (1.0 - busy)
    short = row_s / (row_s + answer_tokens * mean_s)
    return (1.0 - short) * mean_s + short * (busy * mixed_s + (1.0 - busy) * step_s)


def _wait_s(busy: float, workers: int, service_s: float, variation: float) -> float:
    """In one line before so many servers, each busy for that share of the time."""
    together = float(busy ** (sqrt(2 * (workers + 1)) - 1))
    return service_s * (1.0 + variation) / 2 * together / (workers * (1.0 - busy))
