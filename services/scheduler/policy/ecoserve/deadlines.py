"""Deadlines: `slo_scale` times what a request takes on its own, by the worker's speeds at its arrival.

Source: papers/003 §4 (JCT SLO); algorithms.md §1: arrival + slo_scale·(t_p + t_g·RL), with t_p for this
prompt and t_g smoothed (EWMA), fixed once.
"""

from services.scheduler.policy.contract import Task

_WEIGHT = 0.2
_PREFILL_TOKENS_PER_S = 4000.0
_STEP_S = 0.025


class Speeds:
    """A worker's speeds, smoothed; a modest accelerator's until it has measured some."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = _PREFILL_TOKENS_PER_S
        self.decode_step_s = _STEP_S
        self._measured_prefill = self._measured_step = False

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """0 is no measurement."""
        if prefill_tokens_per_s > 0:
            old = self.prefill_tokens_per_s if self._measured_prefill else prefill_tokens_per_s
            self.prefill_tokens_per_s = old + _WEIGHT * (prefill_tokens_per_s - old)
            self._measured_prefill = True
        if decode_step_s > 0:
            old = self.decode_step_s if self._measured_step else decode_step_s
            self.decode_step_s = old + _WEIGHT * (decode_step_s - old)
            self._measured_step = True

    def work_s(self, prefill_tokens: int, decode_tokens: int) -> float:
        """What so much takes with nobody else there."""
        return prefill_tokens / self.prefill_tokens_per_s + decode_tokens * self.decode_step_s

    def deadline_s(self, task: Task, answer_tokens: int, slo_scale: float) -> float:
        """On the clock of `task.arrival_s`; the task's own deadline where it has one."""
        if task.deadline_s is not None:
            return task.deadline_s
        return task.arrival_s + slo_scale * self.work_s(task.prompt_tokens, answer_tokens)
