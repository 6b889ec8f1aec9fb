"""Who has no worker yet: the one queue, and the question to placement about the next of them. Pure."""

from collections.abc import Iterator

from services.scheduler.core.effects import AskPlacement, NoteTurn
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Kind, Phase, Sequence, names_of
from services.scheduler.policy.contract import BY_ARRIVAL, QueueRule
from services.scheduler.policy.fleet_queue import Feed, FleetQueue
from shared.messages.commands import NOBODY_AHEAD, LengthPrediction, PlacementItem
from shared.messages.reports import WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef
from shared.messages.values import MOST_COUNT, as_count, as_seconds

NO_QUESTION = 0
"""Questions are numbered from 1."""
_MOST_TURNS = 256
"""Kept until they are taken."""
_MOST_WITHDRAWN = 256
"""That one question names; placement forgets the others by itself, seconds later."""


class Backlog:
    """Who has no worker yet, in the fleet's one queue, and the question to placement about the next of them.
    Bounded by whoever adds to it."""

    def __init__(self, rules: Rules, rule: QueueRule = BY_ARRIVAL, feed: Feed | None = None) -> None:
        self._rules = rules
        self._queue = FleetQueue(rule, feed=feed)
        self._waiting: dict[SequenceKey, Sequence] = {}
        self._question = NO_QUESTION
        self._open: tuple[SequenceRef, ...] | None = None
        self._due_s = float("-inf")
        self._withdrawn: dict[SequenceRef, None] = {}
        self._tokens: dict[SequenceKey, int] = {}
        self.waiting_tokens = 0
        """To be computed of all that wait, as of when they came."""
        self._turns: list[NoteTurn] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """By arrival."""
        return (self._waiting[task.key] for task in self._queue)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.key) is sequence

    def add(self, sequence: Sequence) -> None:
        """It waits, and a worker is asked for at once. Raises PolicyFailed where the policy's key of one that
        is new does; then nothing has changed."""
        sequence.level = sequence.priority
        self._queue.add(sequence.task(), sequence.tenant, sequence.rank)
        self._waiting[sequence.key] = sequence
        tokens = self._tokens[sequence.key] = sequence.prompt_tokens + sequence.generated_tokens
        self.waiting_tokens += tokens
        self.poke()

    def remove(self, sequence: Sequence) -> None:
        """It leaves without a worker. Raises ValueError when it does not wait."""
        self._take(sequence)
        self._queue.remove(sequence.key)

    def start(self, sequence: Sequence) -> None:
        """It goes to a worker. Raises ValueError when it does not wait."""
        self._take(sequence)
        if (turn := self._queue.explain(sequence.key)) is not None and len(self._turns) < _MOST_TURNS:
            self._turns.append(NoteTurn(sequence.ref, turn))
        sequence.rank = self._queue.start(sequence.key)
        sequence.level = sequence.rank[0]

    def _take(self, sequence: Sequence) -> None:
        if sequence not in self:
            raise ValueError(f"{sequence.ref} is not in the backlog")
        del self._waiting[sequence.key]
        self.waiting_tokens -= self._tokens.pop(sequence.key)

    def take_back(self, sequence: Sequence) -> None:
        """Nothing came of its start."""
        self._queue.refund(sequence.key)

    def settle(self, sequence: Sequence, phase: Phase, answer_tokens: int | None) -> None:
        """It is over at its worker: its tenant is charged for what it was. What was lost and is begun anew is
        not charged; of what was cancelled, what was expected."""
        if phase in (Phase.LOST, Phase.REPLACED):
            self._queue.refund(sequence.key)
        else:
            self._queue.end(sequence.key, answer_tokens, sequence.cached_tokens)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        """How long its answer will be."""
        self._queue.on_predicted(key, prediction)

    def on_reported(self, report: WorkerReported) -> None:
        """A worker's speeds and memory."""
        memory_tokens = report.capacity.total_blocks * report.block_tokens
        self._queue.on_measured(report.prefill_tokens_per_s, report.decode_step_s, memory_tokens)

    def on_tick(self, now_s: float, workers: int) -> None:
        """To be called often: so many workers take work."""
        self._queue.foreseen.on_tick(now_s, workers)

    def wait_s(self, sequence: Sequence) -> float | None:
        """That is foreseen for this one, which is not here; None: nobody can say yet."""
        return self._queue.wait_s(sequence.task(), sequence.tenant)

    def longest_wait_s(self) -> float:
        """That is foreseen for one behind all others; 0 where nobody can say."""
        return self._queue.foreseen.longest_s()

    def first(self, count: int) -> list[Sequence]:
        """Who would go next, and after that, at most `count`."""
        return [self._waiting[key] for key in self._queue.next(count)]

    def work_s(self, sequence: Sequence) -> float:
        """What one would take of a worker that does not wait here yet."""
        return self._queue.work_s(sequence.task())

    def take_turns(self) -> list[NoteTurn]:
        """Those since the last call in which several tenants waited."""
        turns, self._turns = self._turns, []
        return turns

    def charged_s(self) -> Iterator[tuple[str, float]]:
        """What each tenant's counter stands at."""
        return self._queue.turns.charged_s()

    def withdraw(self, ref: SequenceRef) -> None:
        """It was asked for and left before its start: the next question says so."""
        self._withdrawn[ref] = None
        if len(self._withdrawn) > _MOST_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]

    def take_withdrawn(self) -> tuple[SequenceRef, ...]:
        """Since the last call."""
        withdrawn, self._withdrawn = tuple(self._withdrawn), {}
        return withdrawn

    def poke(self) -> None:
        """Something changed: the next question need not wait for the interval."""
        self._due_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Whether somebody is to be asked about, and no question is open."""
        return self._open is None and bool(self._waiting) and now_s >= self._due_s

    def ask(
        self,
        excluded_workers: tuple[str, ...],
        now_s: float,
        kinds: tuple[Kind, ...] = (),
        feed: Feed | None = None,
    ) -> AskPlacement | None:
        """The next question, when one is due and none is open. `kinds` of workers name prompts' blocks;
        `feed` knows who waits at workers."""
        if not self.is_due(now_s):
            return None
        batch = self.first(self._rules.placement_batch)
        ahead = NOBODY_AHEAD if feed is None else feed.ahead(self._queue.rank(batch[0].key))
        if ahead is None:
            self._due_s = now_s + self._rules.placement_interval_s
            return None
        self._question += 1
        self._open = tuple(sequence.ref for sequence in batch)
        self._due_s = float("inf")
        for sequence in batch:
            sequence.is_asked_for = True
        items = tuple(item_of(sequence, kinds, now_s) for sequence in batch)
        return AskPlacement(
            self._question, items, excluded_workers, self.take_withdrawn(), ahead, self.waiting_tokens
        )

    def close(self, question: int, *, more: bool, now_s: float) -> tuple[SequenceRef, ...]:
        """The refs that the question was about; empty when it is not the open one. `more`: go on without a
        pause."""
        if question != self._question or self._open is None:
            return ()
        refs, self._open = self._open, None
        poked = self._due_s == float("-inf")
        self._due_s = float("-inf") if more or poked else now_s + self._rules.placement_interval_s
        return refs

    def check_integrity(self) -> None:
        """Raises AssertionError when queue and table disagree."""
        self._queue.check_integrity()
        assert self._tokens.keys() == self._waiting.keys()
        assert self.waiting_tokens == sum(self._tokens.values())
        assert {task.key for task in self._queue} == self._waiting.keys()


def item_of(sequence: Sequence, kinds: tuple[Kind, ...], now_s: float) -> PlacementItem:
    """What placement is told of it."""
    return PlacementItem(
        ref=sequence.ref,
        size_tokens=as_count(sequence.prompt_tokens + sequence.generated_tokens),
        limit_tokens=as_count(sequence.limit_tokens),
        prefixes=names_of(sequence, kinds),
        waited_s=as_seconds(max(0.0, now_s - sequence.arrival_s)),
        priority=max(-MOST_COUNT, min(sequence.level, MOST_COUNT)),
    )
