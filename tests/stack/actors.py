"""Who takes part in the virtual world: what is wanted, the workers, and what stands for their engines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from services.gateway.core.stream import Stream
from services.worker.core.drafts import MOST_ROWS, Drafts, SoFar
from services.worker.core.plans import StepWork
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sampling import Sampled
from services.worker.core.sequence import HeldSequence
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.steps import StepCore
from services.worker.kv.core.borrowed_pool import Pool
from services.worker.kv.core.prefix_cache import PrefixCache
from shared.blocks import BlockHash, chain, root
from shared.errors import KvasirError
from shared.liveness import Start
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.reports import Capacity, SequenceReport, WorkerReported
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef
from tests.virtual_net import Process

END_TOKEN, WRONG_TOKEN = 2, 99
FINGERPRINT = b"fingerprint"
WEIGHTS = "11" * 16
MODEL = "m"


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


@dataclass(frozen=True)
class Request:
    """What a client asked for, and what it has by now."""

    wanted: Wanted
    stream: Stream

    @property
    def key(self) -> SequenceKey:
        return self.stream.key

    @property
    def ref(self) -> SequenceRef:
        return self.stream.ref

    @property
    def attempt(self) -> int:
        return self.stream.attempt

    @property
    def tokens(self) -> list[int]:
        return self.stream.tokens

    @property
    def expected(self) -> list[int]:
        return self.wanted.answer(self.key)

    @property
    def over(self) -> bool:
        return not self.stream.is_open

    @property
    def ended(self) -> FinishReason | None:
        return self.stream.finish_reason

    @property
    def refused(self) -> KvasirError | None:
        return self.stream.failure


@dataclass
class WorkerProcess(Process):
    """The worker's own core, in its present life."""

    core: Any = None
    beats: int = 0
    incarnation: int = 0
    is_mute: bool = False
    """Answers no snapshot."""
    says: dict[str, Any] = field(default_factory=dict)
    """In its reports, whatever is true; figures of its capacity are named like the others."""
    step_tokens: list[tuple[int, int]] = field(default_factory=list)
    """(prefilled, decoded) of each step of all lives."""
    clock: Callable[[], float] = lambda: 0.0

    def begin(self, says: dict[str, Any]) -> None:
        """Another life. The network starts it."""
        self.alive, self.frozen, self.busy = True, False, False
        self.life += 1
        self.incarnation += 1
        self.beats, self.says = 0, says
        self.mail.clear()

    def numbered(self, report: WorkerReported) -> WorkerReported:
        """As it goes out."""
        self.beats += 1
        capacity = {name: self.says[name] for name in Capacity.__struct_fields__ if name in self.says}
        other = {name: value for name, value in self.says.items() if name not in capacity}
        said = msgspec.structs.replace(report.capacity, **capacity)
        return msgspec.structs.replace(report, **{"seq": self.beats, "capacity": said, **other})

    @property
    def held(self) -> dict[SequenceRef, SequenceReport]:
        """All that it lists, ends that nobody has acknowledged included."""
        listed = self.core.report(self.clock()).sequences if self.alive else ()
        return {one.ref: one for one in listed}

    @property
    def used_blocks(self) -> int:
        return sum(one.allocated_blocks for one in self.held.values())


def step_core(
    start: Start,
    pool: Pool,
    longest_tokens: int,
    prefixes: Prefixes | None = None,
    drafts: Drafts | None = None,
) -> StepCore:
    """Of that run of a worker: all that it decides, without an engine."""
    limits = SequenceLimits(longest_tokens, 1_000_000, end_retention_s=60.0, gateway_timeout_s=10.0)
    identity = Identity(*start, MODEL, longest_tokens, "here", WEIGHTS, FINGERPRINT)
    return StepCore(identity, SequenceTable(pool, limits, prefixes, start), drafts=drafts)


class TrueDrafts(Drafts):
    """Knows answers, tells some of each, and then sometimes a wrong token."""

    def __init__(self, truth: Callable[[SequenceRef], tuple[int, Sequence[int]]], dice: Random) -> None:
        """`truth`: the prompt's tokens, and the answer."""
        super().__init__(MOST_ROWS - 1)
        self._truth, self._dice = truth, dice

    @classmethod
    def of(cls, wanted: Mapping[SequenceKey, Wanted], dice: Random) -> "TrueDrafts":
        return cls(lambda ref: (wanted[ref.key].prompt_tokens, wanted[ref.key].answer(ref.key)), dice)

    def make(self, asked: Sequence[SoFar]) -> list[list[int]]:
        return [self._draft(one, max(0, min(4, one.most_tokens))) for one in asked]

    def _draft(self, asked: SoFar, most_tokens: int) -> list[int]:
        prompt_tokens, answer = self._truth(asked.ref)
        known = answer[len(asked.tokens) - prompt_tokens :][: self._dice.randint(0, most_tokens)]
        wrong = [WRONG_TOKEN] if self._dice.random() < 0.4 else []
        return [*known, *wrong][:most_tokens]


def told_tokens(work: StepWork) -> list[Sampled | None]:
    """An engine whose answers are as long as the first token of their prompt says."""
    return [_told(item.sequence) if item.samples else None for item in work.items]


def _told(sequence: HeldSequence) -> Sampled:
    is_last = sequence.generated_tokens + 1 >= sequence.tokens[0]
    return Sampled(END_TOKEN if is_last else 7)


def true_tokens(wanted: Mapping[SequenceKey, Wanted], work: StepWork) -> list[Sampled | None]:
    """The engine: the next true token, after a look at whether the sequence is what it should be."""
    tokens: list[Sampled | None] = []
    for item in work.items:
        if item.sequence.rehearsal:
            tokens.append(Sampled(END_TOKEN) if item.samples else None)
            continue
        key = item.sequence.ref.key
        truth = wanted[key].answer(key)
        held = [*item.sequence.tokens[wanted[key].prompt_tokens :], *item.guessed]
        if item.guessed and (held != truth[: len(held)] or len(held) >= len(truth)):
            tokens.append(Sampled(WRONG_TOKEN))
            continue
        assert held == truth[: len(held)], f"{key} went astray at its worker"
        tokens.append(Sampled(truth[len(held)]) if item.samples else None)
    return tokens


def shadowed(
    given: PrefixCache,
    taken: PrefixCache,
    order: PullBlocks,
    now_s: float,
    *,
    most_blocks: int,
    copy: Callable[[int, int, BlockHash], None],
) -> BlocksPulled:
    """A pull to the host: what the source has by name, the keeper has then, as far as shadows may. `copy`:
    from a block of the one to a slot of the other."""
    names = chain(root(FINGERPRINT, order.cache_salt), order.tokens, taken.block_tokens)
    known = taken.shadows.known(names, now_s)
    held = given.hold(names[known:][:most_blocks])
    places = taken.shadows.room(len(held), now_s, names[:known])
    came = names[known : known + len(places)]
    for block, place, name in zip(held, places, came, strict=False):
        copy(block, place, name)
    count = taken.shadows.fill(places, came, names[known - 1] if known else None, now_s)
    given.release(held)
    there = taken.block_tokens * (known + count)
    return BlocksPulled(held_tokens=there, fetched_blocks=count, fetched_bytes=count)


def pulled(
    given: PrefixCache,
    taken: PrefixCache,
    order: PullBlocks,
    *,
    most_blocks: int,
    copy: Callable[[int, int], bool] = lambda source, target: True,
) -> BlocksPulled:
    """A pull: what the source has by name, the target has then, as far as there is room. `copy`: from a block
    of the one to a block of the other; whether it could be read."""
    names = chain(root(FINGERPRINT, order.cache_salt), order.tokens, taken.block_tokens)
    known = taken.known_blocks(names)
    count = min(given.known_blocks(names), known + most_blocks)
    parent = names[known - 1] if known else None
    for name in names[known:count]:
        if not taken.can_allocate(2):
            break
        held = given.hold([name])
        (block,) = taken.allocate(1)
        is_whole = copy((held or given.borrowed([name]))[0], block)
        given.release(held)
        if not is_whole:
            taken.release([block])
            break
        taken.publish(block, name, parent)
        taken.release([block])
        parent = name
    there = taken.known_blocks(names)
    fetched = there - known
    return BlocksPulled(held_tokens=taken.block_tokens * there, fetched_blocks=fetched, fetched_bytes=fetched)
