"""What is known of one side after its run: tokens, remote blocks and steps over time. Computes means only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A report of some steps of one worker."""

    at_s: float
    is_remote: bool
    steps: int
    step_s: float
    """Of the last of them."""


@dataclass(frozen=True)
class LiveRun:
    """One side. Seconds since its load began."""

    duration_s: float
    decoded: list[tuple[float, int]]
    """When, how many tokens."""
    shares: list[tuple[float, int, int]]
    """When, blocks in use on another worker, blocks in use; over all workers."""
    finished: int
    errors: list[str]
    counts: Mapping[str, int]
    """Settlements, and blocks that came home by them or into free memory."""
    steps: Sequence[Step] = ()

    def tok_s(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Tokens per second in a part of the run."""
        end_s = min(end_s, self.duration_s)
        return sum(n for at_s, n in self.decoded if first_s <= at_s < end_s) / (end_s - first_s)

    def remote_share(self, first_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Of the KV in use in a part of the run, that on another worker than its request."""
        part = [(remote, used) for at_s, remote, used in self.shares if first_s <= at_s < end_s]
        return sum(remote for remote, _ in part) / max(1, sum(used for _, used in part))

    def step_s(self, first_s: float = 0.0, *, is_remote: bool) -> float:
        """Mean over the steps of one kind; 0 where there were none."""
        kind = [one for one in self.steps if one.at_s >= first_s and one.is_remote is is_remote]
        return sum(one.step_s * one.steps for one in kind) / max(1, sum(one.steps for one in kind))

    def remote_steps(self, first_s: float = 0.0) -> float:
        """Share of steps."""
        part = [one for one in self.steps if one.at_s >= first_s]
        return sum(one.steps for one in part if one.is_remote) / max(1, sum(one.steps for one in part))
