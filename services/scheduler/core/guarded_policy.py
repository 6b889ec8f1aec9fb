"""A wrapper that contains a batching policy's exceptions, which would leave the core's state half changed.

After the first one the policy is no longer called; the fleet replaces it (`core/fleet.py`). Pure.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from services.scheduler.policy.contract import (
    BatchPolicy,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
    policy_name,
)
from shared.errors import PolicyFailed
from shared.messages.sequence import SequenceKey
from shared.plugins import told


class GuardedPolicy:
    """A `contract.BatchPolicy` that records the first exception; its events are the contract's."""

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
