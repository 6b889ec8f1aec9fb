"""Who takes part in the virtual world: what is wanted, and the workers that compute it."""

from dataclasses import dataclass
from typing import Any

from shared.messages.sequence import SequenceKey
from tests.stack.virtual_net import Process

END_TOKEN = 2


@dataclass(frozen=True)
class Wanted:
    """One request: how long its prompt is, how long its true answer, how long the answer may be."""

    prompt_tokens: int
    answer_tokens: int
    max_tokens: int

    def answer(self, key: SequenceKey) -> list[int]:
        """The tokens that the client must get, each exactly once."""
        words = [3 + (hash_of(key) + index * 7) % 90 for index in range(self.answer_tokens - 1)]
        return [*words, END_TOKEN][: self.max_tokens]


def hash_of(key: SequenceKey) -> int:
    """A number of the key that is the same in every process."""
    return sum(key[0].encode())


@dataclass
class WorkerProcess(Process):
    core: Any = None
    beats: int = 0
    incarnation: int = 0
