"""The sequences that have no worker yet, and the question to placement about the next of them. Pure."""

from collections.abc import Iterator
from math import inf
from operator import attrgetter

from services.scheduler.core.effects import AskPlacement, NoteTurn
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Kind, Phase, Sequence, names_of
from services.scheduler.policy.contract import BY_ARRIVAL, QueueRule
from services.scheduler.policy.fleet_queue import Feed, FleetQueue
from shared.messages.commands import NOBODY_AHEAD, PlacementItem
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
    its length. `feed`: the requests that wait at workers."""

    def __init__(self, rules: Rules, rule: QueueRule = BY_ARRIVAL, feed: Feed | None = None) -> None:
        self._rules = rules
        self._feed = feed
        self.queue = FleetQueue(rule, feed=feed)
        self._waiting: dict[SequenceKey, Sequence] = {}
        self._question = NO_QUESTION
        self._open: tuple[SequenceRef, ...] | None = None
        self._due_s = -inf
        self._withdrawn: dict[SequenceRef, None] = {}
        self._tokens: dict[SequenceKey, int] = {}
        self.waiting_tokens = 0
        """Tokens to compute of all waiting sequences, as of their arrival."""
        self.turns: list[NoteTurn] = []
        """Turns among several tenants; the reader takes them."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate by arrival."""
        return (self._waiting[task.key] for task in self.queue)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.ref.key) is sequence

    def add(self, sequence: Sequence) -> None:
        """Add a sequence and allow a question at once. Raises PolicyFailed if the policy cannot rank it."""
        sequence.level = sequence.priority
        self.queue.add(sequence.task(), sequence.tenant, sequence.rank)
        self._waiting[sequence.ref.key] = sequence
        tokens = self._tokens[sequence.ref.key] = sequence.prompt_tokens + sequence.generated_tokens
        self.waiting_tokens += tokens
        self._due_s = -inf

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that gets no worker. Raises ValueError if it does not wait."""
        self._take(sequence)
        self.queue.remove(sequence.ref.key)

    def start(self, sequence: Sequence) -> None:
        """Remove a sequence that goes to a worker, and rank it. Raises ValueError if it does not wait."""
        self._take(sequence)
        key = sequence.ref.key
        turn = None if self.queue.turns is None else self.queue.explain(key)
        if turn is not None and len(self.turns) < _MOST_TURNS:
            self.turns.append(NoteTurn(sequence.ref, turn))
        sequence.rank = self.queue.start(key)
        sequence.level = sequence.rank[0]

    def _take(self, sequence: Sequence) -> None:
        if sequence not in self:
            raise ValueError(f"{sequence.ref} is not in the backlog")
        del self._waiting[sequence.ref.key]
        self.waiting_tokens -= self._tokens.pop(sequence.ref.key)

    def settle(self, sequence: Sequence, phase: Phase, answer_tokens: int | None) -> None:
        """Charge the tenant for a finished sequence; a lost or replaced one is free."""
        if phase in (Phase.LOST, Phase.REPLACED):
            self.queue.refund(sequence.ref.key)
        else:
            self.queue.end(sequence.ref.key, answer_tokens, sequence.cached_tokens)

    def wait_s(self, sequence: Sequence) -> float | None:
        """Return the expected wait of a sequence not queued here, None if unknown."""
        return self.queue.wait_s(sequence.task(), sequence.tenant)

    def first(self, count: int) -> list[Sequence]:
        """Return up to `count` sequences that would go next, in order."""
        return list(map(self._waiting.__getitem__, self.queue.next(count)))

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
        self._due_s = -inf

    def is_due(self, now_s: float) -> bool:
        """Return whether a question may be asked."""
        return self._open is None and bool(self._waiting) and now_s >= self._due_s

    def ask(
        self, excluded_workers: tuple[str, ...], now_s: float, kinds: tuple[Kind, ...] = ()
    ) -> AskPlacement | None:
        """Return the next question, or None. `kinds`: worker kinds to name prompt blocks for."""
        if not self.is_due(now_s):
            return None
        batch = self.first(self._rules.placement_batch)
        ahead = NOBODY_AHEAD if self._feed is None else self._feed.ahead(self.queue.rank(batch[0].ref.key))
        if ahead is None:
            self._due_s = now_s + self._rules.placement_interval_s
            return None
        self._question += 1
        self._due_s = inf
        items: list[PlacementItem] = []
        for sequence in batch:
            sequence.is_asked_for = True
            items.append(item_of(sequence, kinds, now_s))
        self._open = tuple(map(attrgetter("ref"), items))
        return AskPlacement(
            self._question,
            tuple(items),
            excluded_workers,
            self.take_withdrawn(),
            ahead,
            self.waiting_tokens,
        )

    def close(self, question: int, *, more: bool, now_s: float) -> tuple[SequenceRef, ...]:
        """Close the question and return its references, () if it is not open. `more`: ask again at once."""
        if question != self._question or self._open is None:
            return ()
        refs, self._open = self._open, None
        if more or self._due_s == -inf:  # a change since the question
            self._due_s = -inf
        else:
            self._due_s = now_s + self._rules.placement_interval_s
        return refs

    def check_integrity(self) -> None:
        """Raises AssertionError when queue and table disagree."""
        self.queue.check_integrity()
        assert self._tokens.keys() == self._waiting.keys()
        assert self.waiting_tokens == sum(self._tokens.values())
        assert {task.key for task in self.queue} == self._waiting.keys()


def item_of(sequence: Sequence, kinds: tuple[Kind, ...], now_s: float) -> PlacementItem:
    """Return placement's view of a sequence."""
    return PlacementItem(
        ref=sequence.ref,
        size_tokens=as_count(sequence.prompt_tokens + sequence.generated_tokens),
        limit_tokens=as_count(sequence.limit_tokens),
        prefixes=names_of(sequence, kinds) if kinds else (),
        waited_s=as_seconds(max(0.0, now_s - sequence.arrival_s)),
        priority=max(-MOST_COUNT, min(sequence.level, MOST_COUNT)),
    )
