"""A batching policy: the longest request goes first. See services/scheduler/README.md."""

from services.scheduler.policy.contract import Task
from services.scheduler.policy.first_come import VllmPolicy


class LongestFirst(VllmPolicy):
    """Allocates as `vllm` does; `queue_key` is the order of the queue and of each worker."""

    def queue_key(self, task: Task, work_s: float) -> float:
        return -work_s
