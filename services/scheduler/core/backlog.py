"""The sequences that have no worker yet, and the question to placement about the next of them. Pure."""

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
"""Number of a message that asks nothing; questions start at 1."""
_MOST_TURNS = 256
"""Maximum number of turns kept until they are taken."""
_MOST_WITHDRAWN = 256
"""Maximum withdrawals in one question; placement forgets others seconds later."""


class Backlog:
    """Sequences without a worker, in the fleet's queue, and the open question to placement. The caller bounds
    its length."""

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
        """Tokens to compute of all waiting sequences, as of their arrival."""
        self._turns: list[NoteTurn] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate by arrival."""
        return (self._waiting[task.key] for task in self._queue)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.key) is sequence

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence and allow a question at once. Raises PolicyFailed if the policy cannot rank
        it; then nothing has changed."""
        sequence.level = sequence.priority
        self._queue.add(sequence.task(), sequence.tenant, sequence.rank)
        self._waiting[sequence.key] = sequence
        tokens = self._tokens[sequence.key] = sequence.prompt_tokens + sequence.generated_tokens
        self.waiting_tokens += tokens
        self.poke()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that gets no worker. Raises ValueError if it does not wait."""
        self._take(sequence)
        self._queue.remove(sequence.key)

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence that goes to a worker, and rank it. Raises ValueError if it does not wait."""
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
        """Cancel the charge of a start that failed."""
        self._queue.refund(sequence.key)

    def settle(self, sequence: Sequence, phase: Phase, answer_tokens: int | None) -> None:
        """Charge the tenant for a finished sequence. A lost or replaced one is free; a cancelled one costs
        what was expected."""
        if phase in (Phase.LOST, Phase.REPLACED):
            self._queue.refund(sequence.key)
        else:
            self._queue.end(sequence.key, answer_tokens, sequence.cached_tokens)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        """Update the expected length."""
        self._queue.on_predicted(key, prediction)

    def on_reported(self, report: WorkerReported) -> None:
        """Record a worker's speeds and memory."""
        memory_tokens = report.capacity.total_blocks * report.block_tokens
        self._queue.on_measured(report.prefill_tokens_per_s, report.decode_step_s, memory_tokens)

    def on_tick(self, now_s: float, workers: int) -> None:
        """Update the expected waits; call often. `workers`: number of workers that take work."""
        self._queue.foreseen.on_tick(now_s, workers)

    def wait_s(self, sequence: Sequence) -> float | None:
        """Return the expected wait of a sequence not queued here, None if unknown."""
        return self._queue.wait_s(sequence.task(), sequence.tenant)

    def longest_wait_s(self) -> float:
        """Return the expected wait at the end of the queue, 0 if unknown."""
        return self._queue.foreseen.longest_s()

    def first(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences that would go next, in order."""
        return [self._waiting[key] for key in self._queue.next(count)]

    def work_s(self, sequence: Sequence) -> float:
        """Return the expected work of a sequence not queued here, in seconds of a worker."""
        return self._queue.work_s(sequence.task())

    def take_turns(self) -> list[NoteTurn]:
        """Return the turns among several tenants since the last call."""
        turns, self._turns = self._turns, []
        return turns

    def charged_s(self) -> Iterator[tuple[str, float]]:
        """Return each tenant's service counter, in seconds."""
        return self._queue.turns.charged_s()

    def withdraw(self, ref: SequenceRef) -> None:
        """Note that a sequence left before its start, for the next question."""
        self._withdrawn[ref] = None
        if len(self._withdrawn) > _MOST_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]

    def take_withdrawn(self) -> tuple[SequenceRef, ...]:
        """Return the withdrawals since the last call."""
        withdrawn, self._withdrawn = tuple(self._withdrawn), {}
        return withdrawn

    def poke(self) -> None:
        """Allow the next question at once, without waiting for the interval."""
        self._due_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Return whether a question may be asked."""
        return self._open is None and bool(self._waiting) and now_s >= self._due_s

    def ask(
        self,
        excluded_workers: tuple[str, ...],
        now_s: float,
        kinds: tuple[Kind, ...] = (),
        feed: Feed | None = None,
    ) -> AskPlacement | None:
        """Return the next question, or None. `kinds`: worker kinds to name prompt blocks for. `feed`:
        requests that wait at workers."""
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
        """Close the question and return its references; empty if it is not open. `more`: ask again without a
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
    """Return placement's view of a sequence."""
    return PlacementItem(
        ref=sequence.ref,
        size_tokens=as_count(sequence.prompt_tokens + sequence.generated_tokens),
        limit_tokens=as_count(sequence.limit_tokens),
        prefixes=names_of(sequence, kinds),
        waited_s=as_seconds(max(0.0, now_s - sequence.arrival_s)),
        priority=max(-MOST_COUNT, min(sequence.level, MOST_COUNT)),
    )
