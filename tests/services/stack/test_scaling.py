"""What placement wants against what runs."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stack.scaling import WorkerScaling, differences
from shared.messages.moves import WorkersWanted

NAMES = [f"worker-{number}" for number in range(4)]


def wanted(count: int, *parked: str) -> WorkersWanted:
    return WorkersWanted(placement_id="placement-0", incarnation=1, wanted=count, parked=parked)


@pytest.mark.parametrize(
    ("event", "running", "stopped", "expected"),
    [
        (wanted(4), NAMES, [], ([], [])),
        (wanted(2, "worker-2", "worker-3"), NAMES, [], (["worker-2", "worker-3"], [])),
        (wanted(2, "worker-3"), NAMES[:2], NAMES[2:], ([], [])),
        (wanted(3, "worker-2"), NAMES[:2], NAMES[2:], ([], ["worker-3"])),
        (wanted(3), NAMES[:2], NAMES[2:], ([], ["worker-2"])),
        (wanted(9), NAMES[:1], NAMES[1:], ([], NAMES[1:])),
        (wanted(0, *NAMES), NAMES, [], (NAMES[1:], [])),
        (wanted(1, "worker-0"), ["worker-0"], ["worker-1"], (["worker-0"], ["worker-1"])),
    ],
)
def test_differences(
    event: WorkersWanted, running: list[str], stopped: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert differences(event, running, stopped) == expected


@dataclass
class Fleet:
    """Starts and stops at once."""

    running: list[str] = field(default_factory=lambda: list(NAMES))

    def workers(self) -> tuple[list[str], list[str]]:
        return list(self.running), [name for name in NAMES if name not in self.running]

    def stop(self, worker_id: str) -> None:
        self.running.remove(worker_id)

    def start(self, worker_id: str) -> None:
        self.running.append(worker_id)


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from(NAMES))), max_size=20))
def test_somebody_always_runs_and_repeating_changes_nothing(events: list[tuple[int, set[str]]]) -> None:
    fleet = Fleet()
    scaling = WorkerScaling(fleet)
    for count, parked in events:
        scaling.on_wanted(wanted(count, *sorted(parked)))
        assert fleet.running
        needed = [name for name in fleet.running if name not in parked]
        assert len(needed) >= min(count, len(NAMES) - len(parked))
