"""Assigns the roles prefill, decode or both to workers, and chooses where an answer is handed over to. Pure.

Roles are a fixed list, or adaptive: re-evaluated by the estimated request time of each split
(`core/role_costs.py`). A change affects new requests only. After a restart all do both until enough is
measured. The simulator uses the same object.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from services.placement.core.role_costs import Demand, RoleSeconds, Speeds, request_s
from services.placement.core.speeds import LineFit, PromptSpeeds
from shared.errors import ConfigError
from shared.messages.sequence import SequenceKey


class Role(StrEnum):
    """The work that a worker gets."""

    PREFILL = "prefill"
    """Computes prompts; their answers continue elsewhere."""
    DECODE = "decode"
    """Writes answers whose prompts were computed elsewhere."""
    BOTH = "both"

    @property
    def may_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def may_decode(self) -> bool:
        return self is not Role.PREFILL


BOTH, ADAPTIVE = "both", "adaptive"


def read_roles(choice: str | Sequence[str]) -> tuple[Role, ...] | None:
    """Return the fixed roles; None: adaptive; empty: all do both. Raises ConfigError for an unknown role."""
    if choice == ADAPTIVE:
        return None
    if choice == BOTH:
        return ()
    names = [each.strip() for each in choice.split(",")] if isinstance(choice, str) else list(choice)
    known = ", ".join(Role)
    for name in names:
        if name not in tuple(Role):
            raise ConfigError(
                f"no role {name!r}; write {ADAPTIVE}, {BOTH}, or a list of: {known}", param="roles"
            )
    return tuple(Role(name) for name in names)


def are_on(choice: str | Sequence[str]) -> bool:
    """Return whether any role other than `both` is possible. Raises ConfigError."""
    roles = read_roles(choice)
    return roles is None or any(role is not Role.BOTH for role in roles)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load and measurements of one worker."""

    worker_id: str
    memory_tokens: int
    context_tokens: int
    """Context tokens of decoding sequences."""
    decoding: int
    pending_tokens: int
    """Prompt tokens there that are not computed."""
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    """0 if not measured."""
    link_tokens_per_s: float = inf
    """Tokens per second whose KV it receives from others."""
    prefill_context_tokens: float = 0.0
    """Mean number of tokens preceding a prompt token when its speed was measured."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A worker where an answer could continue."""

    load: WorkerLoad
    wait_s: float
    """Time until its link is free."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Chosen target of an answer, with the estimated seconds to its end for each option."""

    worker_id: str | None
    """None: it stays."""
    stays_s: float
    costs_s: tuple[tuple[str, float], ...]
    """Cost per worker, lowest first."""


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """A change of roles and its reasons, for the log."""

    roles: Mapping[str, Role]
    costs_s: Mapping[str, float]
    """Time of a mean request per split: `both`, or prefill + decode workers."""
    chosen: str
    before: str


SEEN_S = 30.0
"""Window of arrivals that count, but never fewer than the last `LEAST_SEEN`."""
LEAST_SEEN = 128
"""Minimum requests in the window. Half of them must arrive before the first change."""
_MOST_SEEN = 4096
LEAVES_BOTH = 0.08
"""Share of a request's time that a split must save against `both` for all."""
CHANGES = 0.05
"""Share that one split must save against another, or `both` against a split."""
EVEN = 0.2
"""Allowed slowdown against the fastest split if fewer answers run beside prompts; half for a new split."""
_FEWER = 0.05
"""Minimum difference in the share of answers handed over."""
_MOST_OPEN = 65_536
_ANSWER_TOKENS = 100.0
_STEP_S = 0.025
"""Decode step if nothing was measured."""
_HAND_OVER_S = 0.05
"""Time of a hand-over, beyond one step and its link."""
_RATE_FADES = 0.995
_PATIENCE = 3
"""Consecutive epochs in which the present roles must be worse."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    computed_tokens: int
    context_tokens: int

    @property
    def preceding_tokens(self) -> float:
        """Preceding tokens, summed over the computed tokens."""
        cached_tokens = self.context_tokens - self.computed_tokens
        return (self.context_tokens**2 - cached_tokens**2) / 2


class DemandMeter:
    """Measures recent arrivals and answers."""

    def __init__(self) -> None:
        self._arrivals: deque[_Arrival] = deque(maxlen=_MOST_SEEN)
        self._answers: deque[int] = deque(maxlen=8 * LEAST_SEEN)

    def on_placed(self, computed_tokens: int, context_tokens: int, now_s: float) -> None:
        """Record a prompt and how many of its tokens must be computed."""
        self._arrivals.append(_Arrival(now_s, computed_tokens, context_tokens))

    def on_ended(self, answer_tokens: int) -> None:
        self._answers.append(answer_tokens)

    @property
    def answer_tokens(self) -> float:
        """Mean answer length; 0 if none was seen."""
        return sum(self._answers) / len(self._answers) if self._answers else 0.0

    def read(self, waiting_tokens: int, preceding_share: float, now_s: float) -> Demand | None:
        """Return the demand, or None if too little was seen. `preceding_share`: cost that each preceding
        token adds to a prompt token, as a share of its cost alone."""
        arrivals = self._arrivals
        while len(arrivals) > LEAST_SEEN and arrivals[0].at_s < now_s - SEEN_S:
            arrivals.popleft()
        count = len(arrivals)
        if count < LEAST_SEEN // 2 or len(self._answers) < LEAST_SEEN // 4 or now_s <= arrivals[0].at_s:
            return None
        mean = sum(one.computed_tokens for one in arrivals) / count
        costs = [one.computed_tokens + preceding_share * one.preceding_tokens for one in arrivals]
        mean_cost = sum(costs) / count
        square = sum(cost**2 for cost in costs) / count
        answer = self.answer_tokens
        return Demand(
            requests_per_s=count / (now_s - arrivals[0].at_s),
            prompt_tokens=mean,
            prompt_variation=max(0.0, square / mean_cost**2 - 1.0),
            answer_tokens=max(1.0, answer),
            context_tokens=sum(one.context_tokens for one in arrivals) / count + answer / 2,
            waiting_tokens=waiting_tokens,
            preceding_tokens=sum(one.preceding_tokens for one in arrivals) / count,
        )


class FleetRoles:
    """Roles of one model's workers. Report arrivals and ends to it; `on_epoch` changes roles."""

    def __init__(self, fixed: tuple[Role, ...] | None) -> None:
        """`fixed`: roles given to workers in the order they appear, further ones do both; None: adaptive."""
        self._fixed = fixed or ()
        self.is_adaptive = fixed is None
        self._roles: dict[str, Role] = {}
        self.demand = DemandMeter()
        self._fit = LineFit()
        self._prompts = PromptSpeeds()
        self._prompt_rate: float | None = None
        self._open: OrderedDict[SequenceKey, None] = OrderedDict()
        self._step_tokens = 1
        self._worse = 0
        self.changes = 0
        self.seconds: Mapping[str, RoleSeconds] = {}
        """Estimate per split, from the last epoch."""

    def role_of(self, worker_id: str) -> Role:
        return self._roles.get(worker_id, Role.BOTH)

    def without_prompts(self) -> set[str]:
        """Return the workers that may not compute prompts."""
        return {name for name, role in self._roles.items() if not role.may_prefill}

    def shortage(self) -> str:
        """Return why no request can be served; empty if some can."""
        roles = set(self._roles.values())
        if roles and not any(role.may_prefill for role in roles):
            return "no worker may compute prompts: all that are there have the role decode"
        if roles and not any(role.may_decode for role in roles):
            return "no worker may write answers: all that are there have the role prefill"
        return ""

    def on_workers(self, worker_ids: Iterable[str]) -> None:
        """Update the set of workers: lost ones free their role, new ones take a free one. If adaptive roles
        would leave no worker for prompts, or none for answers, all do both."""
        there = set(worker_ids)
        for gone in self._roles.keys() - there:
            del self._roles[gone]
        free = list(self._fixed)
        for role in self._roles.values():
            if role in free:
                free.remove(role)
        for new in sorted(there - self._roles.keys()):
            self._roles[new] = free.pop(0) if free else Role.BOTH
        if self.is_adaptive and self.shortage():
            self._roles = dict.fromkeys(self._roles, Role.BOTH)

    def on_placed(self, key: SequenceKey, prompt_tokens: int, expected_tokens: int, now_s: float) -> None:
        """Record a placed prompt with its expected cached tokens. A repeat is ignored."""
        if key not in self._open:
            self._open[key] = None
            self.demand.on_placed(max(1, prompt_tokens - expected_tokens), prompt_tokens, now_s)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)

    def on_ended(self, key: SequenceKey, answer_tokens: int) -> None:
        if key in self._open:
            del self._open[key]
            self.demand.on_ended(answer_tokens)

    def on_epoch(
        self, loads: Sequence[WorkerLoad], waiting_tokens: int, step_tokens: int, now_s: float
    ) -> RoleChoice | None:
        """Re-evaluate roles, about once a second, and return the change, or None. `step_tokens`: maximum
        prompt tokens per step."""
        self.on_workers(load.worker_id for load in loads)
        if not loads:
            return None  # Keep what was measured.
        self._step_tokens = step_tokens
        speeds = self._measure(loads, step_tokens)
        if not self.is_adaptive or speeds is None or len(loads) < 2:
            return None
        preceding_share = speeds.preceding_token_s * speeds.prompt_tokens_per_s
        demand = self.demand.read(waiting_tokens, preceding_share, now_s)
        if demand is None:
            return None
        found = {
            decoders: request_s(speeds, demand, len(loads), decoders, _HAND_OVER_S)
            for decoders in range(len(loads))
        }
        self.seconds = {_name(len(loads), decoders): each for decoders, each in found.items()}
        now = self._decoders(len(loads))
        best = _evenest(found, now)
        if best == now or (now is not None and not _pays(found[now], found[best])):
            self._worse = 0
            return None
        self._worse += 1
        if self._worse < _PATIENCE and now is not None:
            return None
        self._worse = 0
        self._assign(loads, best)
        self.changes += 1
        before = "mixed" if now is None else _name(len(loads), now)
        costs_s = {name: each.felt_s for name, each in self.seconds.items()}
        return RoleChoice(dict(self._roles), costs_s, _name(len(loads), best), before)

    def hand_over(self, tokens: int, source: WorkerLoad, landings: Sequence[Landing]) -> HandOver:
        """Choose where a sequence of `source` continues; `landings` are workers with room for it. It goes
        where it finishes first. With fixed roles it leaves whenever there is a landing."""
        answer = self.demand.answer_tokens or _ANSWER_TOKENS
        prompt_s = 0.0
        if source.pending_tokens > 0 and self._prompt_rate:
            before_s = self._prompts.preceding_token_s * source.prefill_context_tokens
            token_s = 1.0 / self._prompt_rate + before_s
            prompt_s = min(source.pending_tokens, self._step_tokens) * token_s
        stays_s = answer * (self._step_s(source.context_tokens, source) + prompt_s)
        costs: list[tuple[str, float]] = []
        for one in landings:
            moved_s = one.wait_s + tokens / one.load.link_tokens_per_s + _HAND_OVER_S
            answer_s = answer * self._step_s(one.load.context_tokens + tokens, one.load)
            costs.append((one.load.worker_id, moved_s + answer_s))
        costs.sort(key=lambda cost: (cost[1], cost[0]))
        goes = bool(costs) and (not self.is_adaptive or costs[0][1] < stays_s)
        return HandOver(costs[0][0] if goes else None, stays_s, tuple(costs))

    def _step_s(self, context_tokens: int, load: WorkerLoad) -> float:
        fit = self._fit.read()
        if fit is None:
            return load.decode_step_s or _STEP_S
        return fit[0] + fit[1] * context_tokens

    def _decoders(self, workers: int) -> int | None:
        """Return the number of decode workers; None if roles are mixed because workers joined or left."""
        count = sum(role is Role.DECODE for role in self._roles.values())
        both = sum(role is Role.BOTH for role in self._roles.values())
        if both == workers:
            return 0
        return None if both or count == workers else count

    def _measure(self, loads: Sequence[WorkerLoad], step_tokens: int) -> Speeds | None:
        for load in loads:
            if load.decode_step_s > 0 and load.decoding:
                self._fit.add(load.context_tokens, load.decode_step_s)
        fit = self._fit.read()
        if fit is None:
            return None
        step_s, context_token_s = fit
        measured: list[tuple[float, float]] = []
        for load in loads:
            if load.prefill_tokens_per_s > 0 and self.role_of(load.worker_id).may_prefill:
                each_s = 1.0 / load.prefill_tokens_per_s
                if self.role_of(load.worker_id) is Role.PREFILL:
                    # Nothing decodes beside it: its measurement includes a step's own time.
                    each_s = max(0.2 * each_s, each_s - step_s / step_tokens)
                measured.append((each_s, load.prefill_context_tokens))
                self._prompts.on_measured(load.worker_id, 1.0 / each_s, load.prefill_context_tokens)
        if measured:
            # Steps with few prompt tokens measure low speeds: use the best recent value.
            rate = sum(1.0 / self._prompts.without(*each) for each in measured) / len(measured)
            self._prompt_rate = max((self._prompt_rate or 0.0) * _RATE_FADES, rate)
        if self._prompt_rate is None:
            return None
        memory = sum(load.memory_tokens for load in loads) // len(loads)
        link = sum(load.link_tokens_per_s for load in loads) / len(loads)
        before_s = self._prompts.preceding_token_s
        return Speeds(self._prompt_rate, step_s, context_token_s, memory, step_tokens, link, before_s)

    def _assign(self, loads: Sequence[WorkerLoad], decoders: int) -> None:
        """Assign `decoders` workers to decode with as few changes as possible; 0: all do both."""
        if decoders == 0:
            self._roles = {load.worker_id: Role.BOTH for load in loads}
            return
        rank = {Role.DECODE: 0, Role.BOTH: 1, Role.PREFILL: 2}

        def order(load: WorkerLoad) -> tuple[int, int, int, str]:
            role, name = rank[self.role_of(load.worker_id)], load.worker_id
            return role, -load.context_tokens, load.pending_tokens, name

        for at, load in enumerate(sorted(loads, key=order)):
            self._roles[load.worker_id] = Role.DECODE if at < decoders else Role.PREFILL

    def check_integrity(self) -> None:
        """Raise AssertionError if adaptive roles leave no worker for prompts, or none for answers."""
        if self.is_adaptive and self._roles:
            assert not self.shortage() or len(self._roles) == 1


def _pays(before: RoleSeconds, after: RoleSeconds) -> bool:
    """Return whether a new split pays: a sufficient gain, or fewer answers beside prompts."""
    if before.handed_over_share > 0 and after.handed_over_share > before.handed_over_share + _FEWER:
        return True
    gain = CHANGES if before.handed_over_share > 0 else LEAVES_BOTH
    return after.felt_s <= (1.0 - gain) * before.felt_s


def _evenest(found: Mapping[int, RoleSeconds], now: int | None) -> int:
    """Return the number of decode workers to use: near the fastest split, with fewest answers beside prompts.
    Only splits faster than none count. The present split may be slower than a new one."""
    least = min(found, key=lambda decoders: (found[decoders].felt_s, decoders))

    def is_near(decoders: int) -> bool:
        most_s = (1.0 + (EVEN if decoders == now else EVEN / 2)) * found[least].felt_s
        return decoders > 0 and found[decoders].felt_s < min(most_s, found[0].felt_s)

    def order(decoders: int) -> tuple[float, float]:
        return (round(found[decoders].handed_over_share / _FEWER), -found[decoders].felt_s)

    return max(filter(is_near, found), key=order, default=least)


def _name(workers: int, decoders: int) -> str:
    return f"{workers - decoders}+{decoders}" if decoders else BOTH
