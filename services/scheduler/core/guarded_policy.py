"""A wrapper that contains a batching policy's exceptions.

Exceptions never reach the core, whose state they would leave half changed. After the first one the policy is
no longer called; the fleet reads `failure` and replaces the policy (`core/fleet.py`). Pure.
"""

from typing import Any

from services.scheduler.policy.contract import (
    BatchPolicy,
    Holding,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
    policy_name,
)
from shared.errors import PolicyFailed
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey
from shared.plugins import told


class GuardedPolicy:
    """A `contract.BatchPolicy` that records the first exception of the wrapped policy."""

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
        self.failure = PolicyFailed(text)
        self.culprit = culprit
        self.culprit_is_known = method not in ("on_arrival", "on_adopted")

    def _call(self, method: str, culprit: SequenceKey | None, *arguments: object) -> Any:
        if self.failure is not None:
            return None
        try:
            return getattr(self.inner, method)(*arguments)
        except Exception as error:
            self.fail(method, error, culprit)
            return None

    def on_arrival(self, task: Task, now_s: float) -> None:
        self._call("on_arrival", task.key, task, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        self._call("on_adopted", task.key, task, holding, now_s)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        self._call("on_ended", key, key, now_s, answer_tokens)

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        self._call("on_short", key, key, missing_tokens, now_s)

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        self._call("on_prefix_hit", key, key, cached_tokens, now_s)

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        self._call("on_resized", None, capacity_blocks, now_s)

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        self._call("on_measured", None, prefill_tokens_per_s, decode_step_s, now_s)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        self._call("on_predicted", key, key, prediction, now_s)

    def plan(self, now_s: float) -> PlannedBatch | None:
        """Return the next batch; None also after a failure."""
        batch = self._call("plan", None, now_s)
        if batch is None or isinstance(batch, PlannedBatch):
            return batch
        self.fail("plan", TypeError(f"it returned {type(batch).__name__}, not a PlannedBatch"))
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError when the policy's accounts do not balance."""
        if self.inner is not None and self.failure is None:
            self.inner.check_integrity()
