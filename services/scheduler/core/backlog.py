"""Sequences that wait, at workers or without one, and the question to placement about the next. Pure."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from math import inf
from operator import attrgetter

from services.scheduler.core.effects import AskPlacement, NoteTurn
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import Kind, Sequence, names_of
from services.scheduler.policy.contract import BY_ARRIVAL, QueueRule
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES, NO_RANK, FleetQueue, Rank
from services.scheduler.policy.waiting_queue import Line
from shared.messages.commands import NOBODY_AHEAD, Crowd, PlacementItem, WaitingAhead
from shared.messages.sequence import SequenceKey, SequenceRef
from shared.messages.values import MOST_COUNT, as_count, as_seconds

NO_QUESTION = 0
"""Number of a message that asks nothing; questions start at 1."""
_MOST_TURNS = 256
"""Maximum number of turns kept until they are taken."""
_MOST_WITHDRAWN = 256
"""Maximum withdrawals in one question; placement forgets others seconds later."""


_LISTED = 64
"""Maximum workers of each kind that one question names."""
_MOST = 4
"""Number of requests, as a multiple of the places, up to which a higher-ranked one may join a full worker."""


class Feed:
    """Requests that wait at in-step workers. An event's cost does not grow with the fleet."""

    def __init__(self, places: int = FEED_SEQUENCES) -> None:
        """`places` 0: only requests placed into free memory wait."""
        self._places = places
        self._at: dict[str, dict[SequenceKey, tuple[Rank, int]]] = {}
        self._empty: dict[str, None] = {}
        self._begun: dict[str, None] = {}
        """Workers with waiting requests and free places."""
        self._full: Line[tuple[Rank, str]] = Line(lambda one: one)
        """Full workers, each by its best rank."""
        self._best: dict[str, Rank] = {}
        """Best rank of each full worker."""
        self.has_freed = False
        """Whether a place became free; the reader clears it."""
        self.on_left: Callable[[SequenceKey], None] = lambda key: None
        """Called with each key that starts or leaves."""

    def join(self, worker_id: str) -> None:
        """Add an in-step worker with nothing waiting."""
        self.leave(worker_id)
        self._at[worker_id] = {}
        self._file(worker_id)

    def leave(self, worker_id: str) -> None:
        """Remove a worker that is gone or out of step."""
        crowd = self._at.pop(worker_id, None)
        if crowd is not None:
            for key in crowd:
                self.on_left(key)
            self._unfile(worker_id)

    def add(self, worker_id: str, key: SequenceKey, rank: Rank, tokens: int) -> None:
        """Add a request that waits at the worker; ignore a worker that is not in step."""
        if worker_id in self._at:
            self._at[worker_id][key] = (rank, tokens)
            self._file(worker_id)

    def discard(self, worker_id: str, key: SequenceKey) -> None:
        """Remove a request that started or left."""
        crowd = self._at.get(worker_id)
        if crowd is not None and crowd.pop(key, None) is not None:
            self.on_left(key)
            self._file(worker_id)
            self.has_freed = True

    def ahead(self, head: Rank = NO_RANK) -> WaitingAhead | None:
        """Return the places for the next question, or None. A full worker's is for a better `head` only."""
        passed = self._outranked(head) if self._full else []
        if not (self._empty or self._begun or passed):
            return None
        named = [*islice(self._begun, _LISTED), *passed]
        only: list[str] = []
        closed: list[str] = []
        if len(self._full) > _LISTED:
            only = [*passed, *islice(chain(self._empty, self._begun), _LISTED)]
        elif self._full:
            closed = [worker_id for _, worker_id in self._full if worker_id not in passed]
        crowds = tuple(map(self._crowd, named))
        return WaitingAhead(places=self._places, crowds=crowds, only=tuple(only), closed=tuple(closed))

    def has_waiting(self, worker_id: str) -> bool:
        """Return whether any request waits at the worker."""
        return bool(self._at.get(worker_id))

    def waiting(self, worker_id: str) -> frozenset[SequenceKey]:
        """Return the keys that wait at the worker."""
        return frozenset(self._at.get(worker_id, ()))

    def _outranked(self, head: Rank) -> list[str]:
        """Return full workers at which the head outranks all waiting requests, worst rank first."""
        found = islice(self._full.irange_key(max_key=(NO_RANK, ""), reverse=True), _LISTED)
        return [name for best, name in found if head < best and len(self._at[name]) < self._most(head, best)]

    def _most(self, head: Rank, best: Rank) -> int:
        """Return the number of waiting requests that closes a worker to a higher-ranked one. It doubles for a
        better class or turn, so that one tenant cannot close a worker to another."""
        return _MOST * self._places * (2 if head[0] < best[0] else 1)

    def _crowd(self, worker_id: str) -> Crowd:
        crowd = self._at[worker_id]
        tokens = as_count(sum(tokens for _, tokens in crowd.values()))
        places = max(min(1, self._places), self._places - len(crowd))
        return Crowd(worker_id=worker_id, places=places, tokens=tokens)

    def _file(self, worker_id: str) -> None:
        self._unfile(worker_id)
        crowd = self._at[worker_id]
        if not crowd:
            self._empty[worker_id] = None
        elif len(crowd) < self._places or not self._places:
            self._begun[worker_id] = None
        else:
            best = self._best[worker_id] = min(rank for rank, _ in crowd.values())
            self._full.add((best, worker_id))

    def _unfile(self, worker_id: str) -> None:
        self._empty.pop(worker_id, None)
        self._begun.pop(worker_id, None)
        best = self._best.pop(worker_id, None)
        if best is not None:
            self._full.remove((best, worker_id))

    def check_integrity(self) -> None:
        """Raises AssertionError when a worker is in no kind, or two."""
        self._full.check_integrity()
        kinds = [*self._empty, *self._begun, *(worker_id for _, worker_id in self._full)]
        assert sorted(kinds) == sorted(self._at), "a worker in no kind, or two"
        assert {worker_id for _, worker_id in self._full} == self._best.keys()


class Backlog:
    """Sequences without a worker, in the fleet's queue, and the open question to placement. The caller bounds
    its length. `feed`: the requests that wait at workers."""

    def __init__(self, rules: Rules, rule: QueueRule = BY_ARRIVAL, feed: Feed | None = None) -> None:
        self._rules = rules
        self._feed = feed
        self.queue = FleetQueue(rule)
        if feed is not None:
            feed.on_left = self.queue.begin
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

    def is_stuck(self, now_s: float) -> bool:
        """Return whether sequences wait although placement was asked, or no worker lets one more wait."""
        return self._open is None and bool(self._waiting) and now_s < self._due_s

    def ask(
        self, excluded_workers: tuple[str, ...], now_s: float, kinds: tuple[Kind, ...] = ()
    ) -> AskPlacement | None:
        """Return the next question, or None. `kinds`: worker kinds to name prompt blocks for."""
        if not self.is_due(now_s):
            return None
        batch = [each for each in self.first(self._rules.placement_batch) if not each.runs_alone]
        ahead = None if not batch else NOBODY_AHEAD
        if batch and self._feed is not None:
            ahead = self._feed.ahead(self.queue.rank(batch[0].ref.key))
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
            self._question, tuple(items), excluded_workers, self.take_withdrawn(), ahead, self.waiting_tokens
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
        is_bound=sequence.is_bound,
    )
