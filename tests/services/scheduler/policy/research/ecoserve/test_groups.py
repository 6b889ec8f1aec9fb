"""Groups by length: who is together, and in which order."""

from services.scheduler.policy.batch_builder import Job
from services.scheduler.policy.contract import Task
from services.scheduler.policy.research.ecoserve.planner import Groups


def job_of(number: int, rest: int, *, due_s: float = 9.0, computed: int = 10) -> Job:
    task = Task((f"r{number}", 0), 10, 500, float(number))
    return Job(task, 1, None, computed_tokens=computed, due_s=due_s, rest_tokens=rest)


def names(groups: list[list[Job]]) -> list[list[str]]:
    return [[job.task.key[0] for job in group] for group in groups]


def urgency(due_s: float) -> int:
    return 0 if due_s < 1.0 else 1


def test_lengths_within_32_tokens_start_together() -> None:
    groups = Groups()
    jobs = [job_of(0, 33), job_of(1, 64), job_of(2, 32), job_of(3, 65), job_of(4, 1)]
    for job in jobs:
        groups.add(job)
    groups.check_integrity({id(job) for job in jobs})
    assert names(groups.by_arrival()) == [["r0", "r1"], ["r2", "r4"], ["r3"]]
    groups.remove(jobs[3])
    groups.remove(jobs[2])
    assert names(groups.by_arrival()) == [["r0", "r1"], ["r4"]]
    groups.check_integrity({id(jobs[0]), id(jobs[1]), id(jobs[4])})


def test_a_group_is_as_urgent_as_its_most_urgent_and_as_large_as_its_largest() -> None:
    groups = Groups()
    for job in (
        job_of(0, 500),  # long
        job_of(1, 40, computed=300),  # occupies most
        job_of(2, 64),
        job_of(3, 96),
        job_of(4, 128, due_s=0.5),  # urgent
    ):
        groups.add(job)
    assert names(groups.by_slack(urgency)) == [["r4"], ["r1", "r2"], ["r0"], ["r3"]]
