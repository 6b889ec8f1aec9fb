"""A placement policy: the worker with the fewest sequences. See services/placement/README.md."""

from collections.abc import Sequence

from services.placement.policy.contract import Room


class FewestSequences:
    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: room.sequences).worker_id
