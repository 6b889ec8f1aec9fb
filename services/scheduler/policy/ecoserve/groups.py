"""Generation tasks that are expected to end together: groups by ceil(padded remaining length / 32).

A group's slack is its minimum, its occupied KV its maximum. There are as many groups as there are different
lengths, however many jobs wait; they are put in order when they are asked for.

Source: papers/003 §3.2.2 (Time-Synced Batching), §3.3; algorithms.md §1 (Groups).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.policy.job_table import Job, arrival_rank
from services.scheduler.policy.line import Line

GROUP_TOKENS = 32
BIN_TOKENS = 128
"""Occupied KV and lengths are compared in bins of so many."""


def _by_due(job: Job) -> tuple[Any, ...]:
    return (job.due_s, job.task.order)


def _by_occupied(job: Job) -> tuple[Any, ...]:
    return (job.computed_tokens, job.task.order)


@dataclass(slots=True)
class Group:
    members: Line[Job] = field(default_factory=lambda: Line(arrival_rank))
    due: Line[Job] = field(default_factory=lambda: Line(_by_due))
    occupied: Line[Job] = field(default_factory=lambda: Line(_by_occupied))


class Groups:
    """All ready jobs by their length; in a synced policy those of one group start together where they fit."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def add(self, job: Job) -> None:
        group = self._groups.setdefault(_length_of(job), Group())
        for line in (group.members, group.due, group.occupied):
            line.add(job)

    def remove(self, job: Job) -> None:
        group = self._groups[_length_of(job)]
        for line in (group.members, group.due, group.occupied):
            line.remove(job)
        if not len(group.members):
            del self._groups[_length_of(job)]

    def by_arrival(self) -> list[list[Job]]:
        """The group with the oldest member first; members oldest first."""
        groups = [list(group.members) for group in self._groups.values()]
        return sorted(groups, key=lambda members: members[0].task.order)

    def by_slack(self, class_of: Callable[[float], int]) -> list[list[Job]]:
        """Slack class of the most urgent member, then the most occupied KV, then the longest, then the
        oldest."""

        def key(item: tuple[int, Group]) -> tuple[Any, ...]:
            length, group = item
            due, occupied, oldest = group.due.first(), group.occupied.last(), group.members.first()
            assert due is not None and occupied is not None and oldest is not None
            return (
                class_of(due.due_s),
                -(occupied.computed_tokens // BIN_TOKENS),
                -(length * GROUP_TOKENS // BIN_TOKENS),
                oldest.task.order,
            )

        return [list(group.members) for _, group in sorted(self._groups.items(), key=key)]

    def check_integrity(self, jobs: set[int]) -> None:
        """Raises AssertionError unless exactly the jobs with these identities are here, grouped right."""
        found: list[int] = []
        for length, group in self._groups.items():
            assert len(group.members) == len(group.due) == len(group.occupied) > 0
            assert all(_length_of(job) == length for job in group.members)
            found += [id(job) for job in group.members]
        assert len(found) == len(jobs) and set(found) == jobs


def _length_of(job: Job) -> int:
    return -(-job.rest_tokens // GROUP_TOKENS)
