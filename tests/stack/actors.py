"""Who takes part in the virtual world: what is wanted, the workers, and what stands for their engines."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.worker.core.sampling import Sampled
from services.worker.core.step_work import StepWork
from services.worker.kv.core.prefix_cache import PrefixCache
from shared.blocks import chain, root
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.sequence import SequenceKey
from tests.virtual_net import Process

END_TOKEN = 2
FINGERPRINT = b"fingerprint"


@dataclass(frozen=True)
class Wanted:
    """One request: how long its prompt is, how long its true answer, how long the answer may be.

    Prompts of one word begin alike."""

    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    word: int = 1

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


def true_tokens(wanted: Mapping[SequenceKey, Wanted], work: StepWork) -> list[Sampled | None]:
    """The engine: the next true token, after a look at whether the sequence is what it should be."""
    tokens: list[Sampled | None] = []
    for item in work.items:
        if item.sequence.rehearsal:
            tokens.append(Sampled(END_TOKEN) if item.samples else None)
            continue
        key = item.sequence.ref.key
        truth = wanted[key].answer(key)
        held = item.sequence.tokens[wanted[key].prompt_tokens :]
        assert held == truth[: len(held)], f"{key} went astray at its worker"
        tokens.append(Sampled(truth[len(held)]) if item.samples else None)
    return tokens


def pulled(given: PrefixCache, taken: PrefixCache, order: PullBlocks, *, most_blocks: int) -> BlocksPulled:
    """A pull without bytes: what the source has by name, the target has then, as far as there is room."""
    names = chain(root(FINGERPRINT, order.cache_salt), order.tokens, 16)
    known = taken.known_blocks(names)
    count = min(given.known_blocks(names), known + most_blocks)
    parent = names[known - 1] if known else None
    for name in names[known:count]:
        if not taken.can_allocate(2):
            break
        (block,) = taken.allocate(1)
        taken.publish(block, name, parent)
        taken.release([block])
        parent = name
    held = taken.known_blocks(names)
    return BlocksPulled(held_tokens=16 * held, fetched_blocks=held - known)
