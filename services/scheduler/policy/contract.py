"""What a batching policy is: the seam between the plan pipeline and every algorithm, in-tree or from outside.

One policy object decides for one worker. It lives on *projected* state: whatever `plan` returned is taken
as done as soon as it is returned, because the next plan is made while this one runs. Events correct the
projection. What a policy reserves, lends or groups inside (EcoServe's two queues, groups, hosted ranges) is
its own affair; this contract carries only what physically happens at the worker: chunks, decodes, total
allocations, preemptions.

Knows nothing of attempts, epochs, messages or other workers. Source: papers/003 §2 for the split of roles.
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
"""Makes what is used of a value as it was set. Raises ValueError that says what to write instead."""


def read_options(
    policy: str,
    options: Mapping[str, object],
    defaults: Mapping[str, Any],
    readers: Mapping[str, Reader] | None = None,
) -> dict[str, Any]:
    """Every option of `policy`: as set, or its default. One without a reader of its own is a number above 0,
    a whole one where its default is.

    Raises ConfigError for a name that the policy does not know and for a value it cannot use.
    """
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
    """A sequence as a policy sees it. Immutable: progress is the policy's own record."""

    key: SequenceKey
    prompt_tokens: int
    max_tokens: int
    """Limit of the whole answer, `generated_tokens` included."""
    arrival_s: float
    """When the gateway accepted it, on the driver's clock; resumed sequences keep their place."""
    generated_tokens: int = 0
    """Answer tokens there are already; they are prefilled together with the prompt."""
    deadline_s: float | None = None
    prediction: LengthPrediction | None = None
    priority: int = 0
    """Whoever waits with a lower one goes first, whatever else the policy goes by (`priority_in`)."""

    @property
    def limit_tokens(self) -> int:
        """KV slots the last decode needs: the last token of the answer is never written."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def order(self) -> tuple[int, float, SequenceKey]:
        """First come, first served within a priority, with ties broken the same way everywhere."""
        return (self.priority, self.arrival_s, self.key)


CLASS_LEVELS = {ServiceClass.GUARANTEED: -1, ServiceClass.STANDARD: 0, ServiceClass.SHEDDABLE: 1}
"""The lower goes first."""
_LEVEL = 2**62
"""More than the priorities of requests reach, and turns."""
_TURNS_PER_S = 1e6


def priority_in(service_class: ServiceClass, priority: int) -> int:
    """A `Task.priority`: classes come before what requests ask for."""
    return CLASS_LEVELS[service_class] * _LEVEL + priority


def level_of(priority: int) -> int:
    """The class's level in a `Task.priority`."""
    return (priority + _LEVEL // 2) // _LEVEL


def least_priority(level: int) -> int:
    """The lowest `Task.priority` of that level: from here on `level_of` is no less."""
    return level * _LEVEL - _LEVEL // 2


def turn_at(priority: int, counter_s: float) -> int:
    """A `Task.priority` of the same class where several tenants wait: whose turn it was when he was served so
    much comes first, whatever requests ask for."""
    return level_of(priority) * _LEVEL + min(int(counter_s * _TURNS_PER_S), _LEVEL // 4)


class Holding(msgspec.Struct, frozen=True):
    """What a sequence already holds at the worker."""

    computed_tokens: int
    """Tokens of prompt + generated whose KV is there."""
    allocated_blocks: int
    decoding: bool = False
    """Its prefill is over: the next token comes from a decode, and all but the last generated token have
    KV."""


class PlannedPrefill(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [first_token, end_token) of prompt + generated; the chunk that reaches the end yields
    one token."""

    key: SequenceKey
    first_token: int
    end_token: int
    allocated_blocks: int
    """Total allocation once applied; covers `end_token`."""


class PlannedDecode(msgspec.Struct, frozen=True, gc=False):
    """One token in each step, `tokens` in all: fewer than the steps only when the answer's limit comes
    first."""

    key: SequenceKey
    tokens: int
    allocated_blocks: int
    """Total allocation once applied; covers every token of the batch."""


class PlannedPreemption(msgspec.Struct, frozen=True):
    """It gives up all it holds. What becomes of its KV is the pipeline's affair (`weigh`)."""

    key: SequenceKey
    held_blocks: int = 0
    computed_tokens: int = 0
    """What it gives up."""


class PlannedQuestion(msgspec.Struct, frozen=True):
    """The policy wants this sequence's length predicted anew, given that the answer is longer than
    `generated_tokens`."""

    key: SequenceKey
    generated_tokens: int


class PlannedBatch(msgspec.Struct, frozen=True):
    """Up to `steps` iterations. Applied as preemptions, prefills (first step only), decodes. A key is in
    one item only.

    No allocation may count on blocks of a sequence that is merely expected to end: ends are `on_ended`
    events.
    """

    steps: int = 1
    preemptions: tuple[PlannedPreemption, ...] = ()
    prefills: tuple[PlannedPrefill, ...] = ()
    decodes: tuple[PlannedDecode, ...] = ()
    questions: tuple[PlannedQuestion, ...] = ()

    @property
    def decodes_only(self) -> bool:
        """Such a batch may be cut short between any two steps, and each missing step is one `on_short` per
        decode."""
        return not (self.preemptions or self.prefills)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What a policy has to know of its worker when it is made."""

    block_tokens: int
    capacity_blocks: int
    """Blocks that plans may hand out altogether."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Limits that hold for any policy, and `options` that only the named one understands."""

    chunked_prefill: bool = True
    max_batch_sequences: int = 64
    token_budget: int = 512
    """Tokens computed in one step: decodes and prompt chunks together."""
    max_steps: int = 8
    start_tokens: int = 65_536
    """Prompt + generated tokens of all sequences that one batch starts (their text travels in the plan), or
    one sequence."""
    options: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class BatchPolicy(Protocol):
    """Decides one worker's batches. Deterministic: the same calls give the same batches.

    A key that is not known (any more) is ignored by every event: ends and cancels may arrive twice, late,
    or while a planned item is in flight.
    """

    def on_arrival(self, task: Task, now_s: float) -> None:
        """A sequence that holds nothing at the worker."""

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        """A sequence that lives at the worker already (found in a snapshot, or moved there).
        `task.generated_tokens` is what it has by now."""

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        """Ended or cancelled: its blocks are free by the time the next plan is applied. `answer_tokens`: how
        long the answer became, which may be less than was planned; None where it did not end by itself."""

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        """Decodes-only batches were cut short, or its decodes were put off while it waited for stored blocks:
        this sequence generated `missing_tokens` fewer than was planned."""

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        """The worker has the first `cached_tokens` of this sequence stored: its next chunk may start after
        them. Chunks planned before stay valid; only what is missing of them is computed."""

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        """The worker's capacity changed; a policy that hands out too much now preempts in its next plan."""

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        """The worker's measured speeds; 0 before the first measurement."""

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """The predictor's answer, if it ever comes."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        """The next batch, taken as run once returned; None when nothing can run. Asked again after every
        event."""

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance."""


QueueKey = float | tuple[float, ...]
QueueKeyOf = Callable[[Task, float], QueueKey]


@runtime_checkable
class QueueingPolicy(BatchPolicy, Protocol):
    """A policy that also says who is next in the fleet's queue (`policy/fleet_queue.py`)."""

    def queue_key(self, task: Task, work_s: float) -> QueueKey:
        """Place of a sequence that waits: the smallest key goes first; of equal keys, who came first.

        `work_s`: what the sequence is expected to take of a whole worker, in seconds. Asked when a sequence
        arrives and when its predicted length changes, of an object that no worker has. Must not depend on
        anything else that changes. A policy without this method goes by arrival.
        """


class QueueOrder(StrEnum):
    """An order of the fleet's queue that the configuration sets instead of the policy's."""

    ARRIVAL = "arrival"
    WORK = "work"
    """Least work first, prefill and predicted answer."""


def by_arrival(task: Task, work_s: float) -> QueueKey:
    """First come, first served."""
    return task.arrival_s


def by_work(task: Task, work_s: float) -> QueueKey:
    """Least work first."""
    return work_s


PASSING_SHARE = 0.35
"""Of the work that starts while somebody older waits, so much may pass them."""
TRIAL_SHAPE = WorkerShape(block_tokens=16, capacity_blocks=4096)
"""Of an object that plans for no worker."""


@dataclass(frozen=True, slots=True)
class QueueRule:
    """In which order sequences wait for a worker."""

    key: QueueKeyOf = by_arrival
    passing_share: float = 1.0
    """Of the work that starts while somebody older waits, so much may pass them; 1: the key alone counts."""
    name: str = "the policy"
    """Whose key it is, for errors."""

    def place(self, task: Task, work_s: float) -> tuple[float, ...]:
        """The key, always a tuple. Raises PolicyFailed where that is no number, or raises."""
        try:
            found = self.key(task, work_s)
            place = tuple(map(float, found)) if isinstance(found, tuple) else (float(found),)
            if any(isnan(each) for each in place):
                raise ValueError(f"{found!r} is no place in a queue")
        except Exception as error:  # anything that outside code may raise
            raise PolicyFailed(f"{self.name} raised {told(error)} in queue_key") from error
        return place


BY_ARRIVAL = QueueRule()
BY_WORK = QueueRule(by_work, PASSING_SHARE)


def queue_rule(
    make_policy: "PolicyFactory", settings: PolicySettings, order: QueueOrder | None = None
) -> QueueRule:
    """As the policy wants it, unless `order` says otherwise. A policy's `passing_share` bounds how much work
    may pass those that came first."""
    policy = make_policy(TRIAL_SHAPE, settings)
    share = float(getattr(policy, "passing_share", PASSING_SHARE if order else 1.0))
    if order is not None:
        return QueueRule(by_work if order is QueueOrder.WORK else by_arrival, share)
    return QueueRule(queue_key_of(policy) or by_arrival, share, policy_name(make_policy))


def queue_key_of(policy: BatchPolicy) -> QueueKeyOf | None:
    """None: it goes by arrival."""
    found: QueueKeyOf | None = getattr(policy, "queue_key", None)
    return found


def policy_name(make_policy: object) -> str:
    """What errors call a policy."""
    return f"batching policy {getattr(make_policy, '__name__', make_policy)}"


PolicyFactory = Callable[[WorkerShape, PolicySettings], BatchPolicy]
