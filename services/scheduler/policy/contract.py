"""The interface between the plan pipeline and every batching policy, in-tree or external.

A policy object decides for one worker, on *projected* state: each batch that `plan` returns counts as run at
once, and events correct that. It knows nothing of attempts, epochs, messages or other workers. Source:
papers/003 §2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import isnan
from typing import Any, Protocol, runtime_checkable

import msgspec

from shared.errors import ConfigError, PolicyFailed
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey, ServiceClass
from shared.plugins import told

Reader = Callable[[object], Any]
"""Parser of one option's value. Raises ValueError with the text that describes a valid value."""


def read_options(
    policy: str,
    options: Mapping[str, object],
    defaults: Mapping[str, Any],
    readers: Mapping[str, Reader] | None = None,
) -> dict[str, Any]:
    """Return every option of `policy`, as set or by default. An option without a reader must be a positive
    number, an integer where its default is one. Raises ConfigError for an unknown name or a wrong value."""
    found = dict(defaults)
    for name, value in options.items():
        if name not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise ConfigError(f"{policy} has no option {name!r}; it has: {known}", param="policy_options")
        read = (readers or {}).get(name) or partial(_positive, is_whole=isinstance(defaults[name], int))
        try:
            found[name] = read(value)
        except ValueError as error:
            text = f"{policy}: option {name!r} is {value!r}; write {error}"
            raise ConfigError(text, param="policy_options") from None
    return found


def _positive(value: object, *, is_whole: bool) -> float:
    kinds = (int,) if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        raise ValueError(f"a {'whole ' if is_whole else ''}number above 0")
    return value if is_whole else float(value)


class Task(msgspec.Struct, frozen=True):
    """A sequence as a policy sees it. Immutable; the policy keeps its own record of progress."""

    key: SequenceKey
    prompt_tokens: int
    max_tokens: int
    """Limit of the whole answer, including `generated_tokens`."""
    arrival_s: float
    """Time at which the gateway accepted the sequence, on the driver's clock; unchanged by a resume."""
    generated_tokens: int = 0
    """Number of answer tokens that exist already; they are prefilled together with the prompt."""
    deadline_s: float | None = None
    prediction: LengthPrediction | None = None
    priority: int = 0
    """Waiting sequences with a lower value go first, before any other criterion (`priority_in`)."""
    cached_tokens: int = 0
    """Prompt tokens that its worker is expected to have in its prefix cache."""

    @property
    def limit_tokens(self) -> int:
        """Number of KV slots that the last decode needs. The last answer token is never written."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def order(self) -> tuple[int, float, SequenceKey]:
        """Sort key: priority, then arrival, then key as a deterministic tie-break."""
        return (self.priority, self.arrival_s, self.key)


CLASS_LEVELS = {ServiceClass.GUARANTEED: -1, ServiceClass.STANDARD: 0, ServiceClass.SHEDDABLE: 1}
"""Level of each class; lower goes first."""
_LEVEL = 2**62
"""Distance between two levels; larger than any request's priority or turn."""
_TURNS_PER_S = 1e6


def priority_in(service_class: ServiceClass, priority: int) -> int:
    """Return the `Task.priority` of a request: the class outranks the request's own priority."""
    return CLASS_LEVELS[service_class] * _LEVEL + priority


def level_of(priority: int) -> int:
    """Return the class level encoded in a `Task.priority`."""
    return (priority + _LEVEL // 2) // _LEVEL


def least_priority(level: int) -> int:
    """Return the lowest `Task.priority` whose `level_of` is at least `level`."""
    return level * _LEVEL - _LEVEL // 2


def turn_at(priority: int, counter_s: float) -> int:
    """Return the `Task.priority` that orders tenants within a class: the least served tenant goes first."""
    return level_of(priority) * _LEVEL + min(int(counter_s * _TURNS_PER_S), _LEVEL // 4)


class Holding(msgspec.Struct, frozen=True):
    """Tokens and blocks that a sequence already holds at the worker."""

    computed_tokens: int
    """Number of prompt and generated tokens whose KV is at the worker."""
    allocated_blocks: int
    decoding: bool = False
    """Whether prefill is complete. Then all generated tokens but the last have KV."""


class PlannedPrefill(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [first_token, end_token) of prompt + generated. The last chunk yields a token."""

    key: SequenceKey
    first_token: int
    end_token: int
    allocated_blocks: int
    """Total allocation once applied; covers `end_token`."""


class PlannedDecode(msgspec.Struct, frozen=True, gc=False):
    """One token per step, `tokens` in total: fewer than the steps only if the answer reaches its limit."""

    key: SequenceKey
    tokens: int
    allocated_blocks: int
    """Total allocation once applied; covers every token of the batch."""


class PlannedPreemption(msgspec.Struct, frozen=True):
    """The sequence releases all its blocks. The pipeline decides what becomes of its KV (`weigh`)."""

    key: SequenceKey
    held_blocks: int = 0
    computed_tokens: int = 0
    """Tokens of KV that it gives up."""


class PlannedQuestion(msgspec.Struct, frozen=True):
    """Request for a new length prediction, given that the answer is longer than `generated_tokens`."""

    key: SequenceKey
    generated_tokens: int


class PlannedBatch(msgspec.Struct, frozen=True):
    """A batch of up to `steps` iterations: preemptions, then prefills (first step only), then decodes. A key
    appears in one item only. No allocation may rely on blocks of a sequence that is only expected to end."""

    steps: int = 1
    preemptions: tuple[PlannedPreemption, ...] = ()
    prefills: tuple[PlannedPrefill, ...] = ()
    decodes: tuple[PlannedDecode, ...] = ()
    questions: tuple[PlannedQuestion, ...] = ()

    @property
    def decodes_only(self) -> bool:
        """Whether the batch only decodes. Such a batch may be cut after any step; each missing step is one
        `on_short` per decode."""
        return not (self.preemptions or self.prefills)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """The worker's memory, as a new policy needs it."""

    block_tokens: int
    capacity_blocks: int
    """Total number of blocks that plans may allocate."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Limits that apply to any policy, and `options` that only the named policy understands."""

    chunked_prefill: bool = True
    max_batch_sequences: int = 64
    token_budget: int = 512
    """Tokens computed in one step: decodes and prompt chunks together."""
    max_steps: int = 8
    start_tokens: int = 65_536
    """Maximum prompt + generated tokens that one batch starts; a single sequence may exceed it."""
    options: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class BatchPolicy(Protocol):
    """Decides one worker's batches. Deterministic: the same calls give the same batches. Every event ignores
    an unknown key: ends and cancels may arrive twice, late, or while an item is in flight."""

    def on_arrival(self, task: Task, now_s: float) -> None:
        """Add a sequence that holds nothing at the worker."""

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        """Add a sequence that runs at the worker; `task.generated_tokens` is its current count."""

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        """Remove a sequence. `answer_tokens`: final length of the answer, None if it was stopped."""

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        """Subtract `missing_tokens` planned tokens that were not generated."""

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        """Record that the worker has the first `cached_tokens` in its prefix cache, so the next chunk may
        start after them. Chunks planned earlier stay valid; the worker computes only their missing part."""

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        """Set the worker's capacity. A policy that has allocated more preempts in its next plan."""

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        """Set the worker's measured speeds; 0 before the first measurement."""

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Set the predicted length; it may never arrive."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        """Return the next batch, which counts as run, or None. Called again after every event."""

    def check_integrity(self) -> None:
        """Raises AssertionError when the policy's accounts do not balance."""


QueueKey = float | tuple[float, ...]
QueueKeyOf = Callable[[Task, float], QueueKey]
"""A policy's optional method `queue_key(task, work_s)`: the sort key of a waiting sequence, smallest first,
ties by arrival. `work_s`: expected work in seconds of a whole worker. Called on an object without a worker,
on arrival and when the predicted length changes."""


class QueueOrder(StrEnum):
    """Order of the fleet's queue, set by the configuration instead of the policy."""

    ARRIVAL = "arrival"
    WORK = "work"
    """Least work first: prefill plus predicted answer."""


def by_arrival(task: Task, work_s: float) -> QueueKey:
    """Return the key for first come, first served."""
    return task.arrival_s


def by_work(task: Task, work_s: float) -> QueueKey:
    """Return the key for least work first."""
    return work_s


PASSING_SHARE = 0.8
"""Share of started work that may pass older waiting work."""
REFUSE_WAIT_S = 10.0
"""Longest expected wait of an accepted request, by default."""
TRIAL_SHAPE = WorkerShape(block_tokens=16, capacity_blocks=4096)
"""Shape for a policy object that plans for no worker."""


@dataclass(frozen=True, slots=True)
class QueueRule:
    """Order in which sequences wait for a worker."""

    key: QueueKeyOf = by_arrival
    passing_share: float = 1.0
    """Share of started work that may pass older waiting work; 1: no limit."""
    name: str = "the policy"
    """Name of the key's owner, for errors."""

    def place(self, task: Task, work_s: float) -> tuple[float, ...]:
        """Return the key as a tuple. Raises PolicyFailed if the key function raises or returns no number."""
        try:
            found = self.key(task, work_s)
            place = tuple(map(float, found)) if isinstance(found, tuple) else (float(found),)
            if any(map(isnan, place)):
                raise ValueError(f"{found!r} is no place in a queue")
        except Exception as error:  # outside code may raise anything
            raise PolicyFailed(f"{self.name} raised {told(error)} in queue_key") from error
        return place


BY_ARRIVAL = QueueRule()
BY_WORK = QueueRule(by_work, PASSING_SHARE)


def queue_rule(
    make_policy: "PolicyFactory", settings: PolicySettings, order: QueueOrder | None = None
) -> QueueRule:
    """Return the policy's rule, or the one for `order`, with the policy's `passing_share`."""
    policy = make_policy(TRIAL_SHAPE, settings)
    share = float(getattr(policy, "passing_share", PASSING_SHARE if order else 1.0))
    if order is not None:
        return QueueRule(by_work if order is QueueOrder.WORK else by_arrival, share)
    return QueueRule(queue_key_of(policy) or by_arrival, share, policy_name(make_policy))


def queue_key_of(policy: BatchPolicy) -> QueueKeyOf | None:
    """Return the policy's key function, or None if it goes by arrival."""
    found: QueueKeyOf | None = getattr(policy, "queue_key", None)
    return found


def policy_name(make_policy: object) -> str:
    """Return the policy's name for errors."""
    return f"batching policy {getattr(make_policy, '__name__', make_policy)}"


PolicyFactory = Callable[[WorkerShape, PolicySettings], BatchPolicy]


class GuardedPolicy:
    """Wrapper that contains a policy's exceptions, which would leave the core's state half changed.

    It records the first one and no longer calls the policy; the fleet replaces it (`core/fleet.py`)."""

    def __init__(self, make_policy: PolicyFactory, shape: WorkerShape, settings: PolicySettings) -> None:
        self.failure: PolicyFailed | None = None
        self.culprit: SequenceKey | None = None
        """The sequence of the failing call; None if it concerned no particular one."""
        self.culprit_is_known = False
        """Whether an earlier call added the culprit."""
        self.inner: BatchPolicy | None = None
        self._name = policy_name(make_policy)
        try:
            self.inner = make_policy(shape, settings)
        except Exception as error:  # outside code may raise anything
            self.fail("__init__", error)

    def fail(self, method: str, error: Exception, culprit: SequenceKey | None = None) -> None:
        """Record that `method` raised, or that its result is invalid."""
        is_told = isinstance(error, PolicyFailed)
        text = str(error) if is_told else f"{self._name} raised {told(error)} in {method}"
        self.failure, self.culprit = PolicyFailed(text), culprit
        self.culprit_is_known = method not in ("on_arrival", "on_adopted")

    def __getattr__(self, event: str) -> Callable[..., Any]:
        """Return the policy's handler of an event, guarded; it does nothing after a failure."""
        if not event.startswith("on_"):
            raise AttributeError(event)
        guarded = partial(self._call, event)
        self.__dict__[event] = guarded
        return guarded

    def _call(self, method: str, *arguments: Any) -> Any:
        if self.failure is not None:
            return None
        try:
            return getattr(self.inner, method)(*arguments)
        except Exception as error:
            about = arguments[0].key if isinstance(arguments[0], Task) else arguments[0]
            self.fail(method, error, about if isinstance(about, tuple) else None)
            return None

    def on_gained(self, key: SequenceKey, tokens: int, now_s: float) -> None:
        """Call the policy's optional method of that name: tokens were generated beyond those planned. Without
        it, the policy takes the answer for shorter than it is until a snapshot."""
        if hasattr(self.inner, "on_gained"):
            self._call("on_gained", key, tokens, now_s)

    def plan(self, now_s: float) -> PlannedBatch | None:
        """Return the next batch; None also after a failure."""
        batch = self._call("plan", now_s)
        if batch is None or isinstance(batch, PlannedBatch):
            return batch
        self.fail("plan", TypeError(f"it returned {type(batch).__name__}, not a PlannedBatch"))
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the policy's accounts do not balance."""
        if self.inner is not None and self.failure is None:
            self.inner.check_integrity()
