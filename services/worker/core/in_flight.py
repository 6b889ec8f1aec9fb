"""Steps in flight, and the blocks that may be given back once they are over. Pure."""

from collections import deque
from collections.abc import Callable, Collection, Iterable

from services.worker.kv.core.block_pool import BlockTable, block_table


class InFlight:
    """Counts the steps of one worker that were begun and are not over. They are over in order."""

    def __init__(self, give_back: Callable[[BlockTable], None]) -> None:
        self._give_back = give_back
        self._begun = self._over = 0
        self._leaving: deque[tuple[int, BlockTable]] = deque()
        """Blocks that steps up to that number may still write to."""

    def __bool__(self) -> bool:
        return self._begun > self._over

    @property
    def blocks(self) -> Iterable[BlockTable]:
        """Tables of blocks that wait for the end of steps."""
        return (blocks for _, blocks in self._leaving)

    @property
    def leaving_blocks(self) -> int:
        return sum(map(len, self.blocks))

    def begin(self) -> None:
        self._begun += 1

    def end(self) -> None:
        """Note that the oldest step is over, and give back what waited for it."""
        self._over += 1
        while self._leaving and self._leaving[0][0] <= self._over:
            self._give_back(self._leaving.popleft()[1])

    def leave(self, blocks: BlockTable) -> None:
        """Give blocks back once the steps in flight are over."""
        self._leaving.append((self._begun, blocks))

    def lose(self, gone: Collection[int]) -> None:
        """Give back at once those of the blocks that wait: no step can write to them any more."""
        waiting, self._leaving = self._leaving, deque()
        for step, blocks in waiting:
            self._leaving.append((step, block_table(each for each in blocks if each not in gone)))
            if lost := block_table(each for each in blocks if each in gone):
                self._give_back(lost)
