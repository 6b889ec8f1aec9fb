"""Which workers are in a packer's books, in which of their lives, and which get nothing more. Pure."""

from collections.abc import Iterable

from services.placement.core.fleet import FleetCapacity, Resident
from shared.messages.sequence import SequenceKey


class Roll:
    """Workers by id."""

    def __init__(self) -> None:
        self.present: dict[str, int] = {}
        """In the books, with their incarnation."""
        self._retired: dict[str, int] = {}
        """Incarnations of workers that get nothing more."""

    def heard(self, fleet: FleetCapacity) -> dict[str, int]:
        """The incarnation of each that may get something."""
        return {
            name: worker.incarnation
            for name, worker in fleet.workers.items()
            if self._retired.get(name) != worker.incarnation
        }

    def seen(self, fleet: FleetCapacity) -> dict[SequenceKey, tuple[str, Resident]]:
        """Where the highest attempt of each sequence is; a rehearsal is nobody's."""
        seen: dict[SequenceKey, tuple[str, Resident]] = {}
        for worker in fleet.workers.values():
            if self.present.get(worker.worker_id) != worker.incarnation:
                continue
            for key, resident in worker.residents.items():
                before = seen.get(key)
                is_newer = before is None or before[1].attempt < resident.attempt
                if resident.is_read and is_newer:
                    seen[key] = (worker.worker_id, resident)
        return seen

    def retire(self, worker_id: str, fleet: FleetCapacity) -> None:
        """It gets nothing more in this incarnation."""
        worker = fleet.workers.get(worker_id)
        if worker is not None:
            self._retired[worker_id] = worker.incarnation

    def unretire(self, worker_id: str) -> None:
        """It was not stopped after all."""
        self._retired.pop(worker_id, None)

    def state_of(self, worker_id: str, *, has_residents: bool) -> str:
        """For people: of one that the books have nothing for."""
        if worker_id not in self.present:
            return "retired" if worker_id in self._retired else "unknown"
        return "draining" if has_residents else "idle"

    def emptiest(self, homes: Iterable[tuple[object, int]], most_blocks: int) -> list[str]:
        """Workers that `homes`, sequences' workers and blocks, fill to at most so much, emptiest first."""
        used = dict.fromkeys(self.present, 0)
        for home, blocks in homes:
            if home in used:
                used[home] += blocks
        return [
            name for _, name in sorted((size, name) for name, size in used.items() if size <= most_blocks)
        ]
