"""Chooses the cycles of debts to settle, and settles them with their workers. Pure: sends nothing.

Short cycles come first, and larger amounts at equal length. In each round, every debtor copies some of its
blocks home into bounce buffers: freeze, copy, commit, unfreeze. Once all have copied, each is told to commit:
use the copies and return the originals. A refusal, a silence or a death before the commit changes nothing;
after it, each worker has recalled its blocks or not, and the debts are valid either way. A worker that hears
nothing thaws by itself. Source: papers/001 §4.5; `algorithms.md` §4.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from shared.liveness import Liveness
from shared.messages.lending import Settle, Settled, SettlePhase

SEARCH_STEPS = 200_000
"""Steps of the enumeration of short cycles, each well below a microsecond."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """A cycle in which each member owes the next, and the last the first. All debts shrink by `amount`."""

    members: tuple[str, ...]
    amount: int


def settlements(
    debts: Mapping[tuple[str, str], int], threshold: int, *, search_steps: int = SEARCH_STEPS
) -> list[Settlement]:
    """Return the settlements, in order. `debts` by (debtor, creditor), none below `threshold`.

    Short cycles are enumerated while that is cheap (`search_steps`). Then a depth-first search cancels cycles
    as it meets them. Unlike the paper's Algorithm 1, this finds directed cycles: it misses no pair that owe
    each other, and takes no two paths for a cycle.

    An example: a owes b 5, b owes a 3 and c 4, c owes a 4. The pair goes first, by 3: a owes b 2, b owes a
    nothing. Then the circle a → b → c → a, by 2: b owes c 2, c owes a 2. Every balance is what it was.
    Raises ValueError for a threshold below 1.
    """
    names = sorted({name for pair in debts for name in pair})
    index = {name: at for at, name in enumerate(names)}
    numbered = {(index[debtor], index[creditor]): amount for (debtor, creditor), amount in debts.items()}
    graph = DebtGraph(len(names), numbered, threshold)
    found = _short_cycles(graph, search_steps)
    found += _other_cycles(graph)
    return [Settlement(tuple(names[node] for node in cycle), amount) for cycle, amount in found]


class DebtGraph:
    """Debts between nodes 0 … n-1.

    A debt below `threshold` is no edge, because a cycle is worth its smallest debt.
    """

    def __init__(self, nodes: int, debts: Mapping[tuple[int, int], int], threshold: int) -> None:
        if threshold < 1:
            raise ValueError(f"a threshold of {threshold} is below 1")
        self.threshold = threshold
        self.owed: list[dict[int, int]] = [{} for _ in range(nodes)]
        """By debtor: amounts by creditor."""
        for (debtor, creditor), amount in debts.items():
            if debtor != creditor and amount >= threshold:
                self.owed[debtor][creditor] = amount
        self.trim(range(nodes))

    def least(self, cycle: list[int]) -> int:
        """Return the smallest debt of a cycle, in which each node owes the next; 0 if a debt is missing."""
        owed = self.owed
        return min(owed[cycle[at - 1]].get(cycle[at], 0) for at in range(len(cycle)))

    def settle(self, cycle: list[int], amount: int) -> None:
        """Reduce every debt of the cycle, and remove those that fall below the threshold."""
        for at in range(len(cycle)):
            creditors = self.owed[cycle[at - 1]]
            left = creditors[cycle[at]] - amount
            if left < self.threshold:
                del creditors[cycle[at]]
            else:
                creditors[cycle[at]] = left

    def trim(self, nodes: Iterable[int]) -> None:
        """Remove nodes without debtors or without creditors, repeatedly: they are on no cycle."""
        debtors: list[set[int]] = [set() for _ in self.owed]
        for debtor, creditors in enumerate(self.owed):
            for creditor in creditors:
                debtors[creditor].add(debtor)
        open_nodes = [node for node in nodes if not self.owed[node] or not debtors[node]]
        while open_nodes:
            node = open_nodes.pop()
            for creditor in self.owed[node]:
                debtors[creditor].discard(node)
                if not debtors[creditor]:
                    open_nodes.append(creditor)
            self.owed[node] = {}
            for debtor in debtors[node]:
                del self.owed[debtor][node]
                if not self.owed[debtor]:
                    open_nodes.append(debtor)
            debtors[node] = set()

    def cycles_of(self, length: int, most_steps: int) -> tuple[list[list[int]], int]:
        """Return all cycles of that length, each once, and the steps taken. Stops after `most_steps`."""
        if length == 2:
            owed = self.owed
            pairs = [[a, b] for a, there in enumerate(owed) for b in there if a < b and a in owed[b]]
            return pairs, sum(map(len, owed))
        found: list[list[int]] = []
        steps = 0
        for first, creditors in enumerate(self.owed):
            if not creditors:
                continue
            stack = [[first]]
            while stack:
                path = stack.pop()
                ends = self.owed[path[-1]]
                steps += 1
                if len(path) == length:
                    if first in ends:
                        found.append(path)
                    continue
                steps += len(ends)
                stack += [[*path, node] for node in ends if node > first and node not in path]
            if steps > most_steps:
                break
        return found, steps


def _short_cycles(graph: DebtGraph, search_steps: int) -> list[tuple[list[int], int]]:
    settled: list[tuple[list[int], int]] = []
    length = 2
    while any(graph.owed) and search_steps > 0 and length <= len(graph.owed):
        cycles, steps = graph.cycles_of(length, search_steps)
        search_steps -= steps
        settled += _largest_first(graph, cycles)
        graph.trim(range(len(graph.owed)))
        length += 1
    return settled


def _largest_first(graph: DebtGraph, cycles: list[list[int]]) -> list[tuple[list[int], int]]:
    """Settle cycles of one length. Rank a cycle again when its amount has shrunk."""
    ranked = [(-graph.least(cycle), cycle) for cycle in cycles]
    heapify(ranked)
    settled: list[tuple[list[int], int]] = []
    while ranked:
        amount, cycle = heappop(ranked)
        now = graph.least(cycle)
        if now < graph.threshold:
            continue
        if now < -amount:
            heappush(ranked, (-now, cycle))
            continue
        graph.settle(cycle, now)
        settled.append((cycle, now))
    return settled


def _other_cycles(graph: DebtGraph) -> list[tuple[list[int], int]]:
    """Cancel each cycle that closes on the path, and continue before its first cancelled debt."""
    settled: list[tuple[list[int], int]] = []
    to_try = [list(creditors) for creditors in graph.owed]
    """Debts by debtor that may still lead to a cycle; the last is being tried."""
    place = [-1] * len(to_try)
    """Position of each node on the path; -1: not on it."""
    for root in range(len(to_try)):
        path = [root] if to_try[root] else []
        if path:
            place[root] = 0
        while path:
            node = path[-1]
            if not to_try[node]:
                place[node] = -1
                path.pop()
                if path:
                    to_try[path[-1]].pop()
                continue
            following = to_try[node][-1]
            if place[following] >= 0:
                back = _cancel(graph, path, place[following], to_try, settled)
                for left in path[back + 1 :]:
                    place[left] = -1
                del path[back + 1 :]
            elif not to_try[following]:
                to_try[node].pop()
            else:
                place[following] = len(path)
                path.append(following)
    return settled


def _cancel(
    graph: DebtGraph,
    path: list[int],
    start: int,
    to_try: list[list[int]],
    settled: list[tuple[list[int], int]],
) -> int:
    """Settle the cycle at the path's end; return the position of the first debtor without its debt."""
    cycle = path[start:]
    owed = graph.owed
    following = [*cycle[1:], cycle[0]]
    amounts = [owed[debtor][creditor] for debtor, creditor in zip(cycle, following, strict=True)]
    amount = min(amounts)
    least = amount + graph.threshold
    back = len(cycle)
    for at, (debtor, creditor) in enumerate(zip(cycle, following, strict=True)):
        if amounts[at] < least:
            del owed[debtor][creditor]
            to_try[debtor].pop()
            back = min(back, at)
        else:
            owed[debtor][creditor] = amounts[at] - amount
    settled.append((cycle, amount))
    return start + back


@dataclass(frozen=True, slots=True)
class SettlementAsk:
    """A message to one worker of a cycle. Pass its answer to `on_answer`; None for a timeout."""

    worker_id: str
    message: Settle


@dataclass(frozen=True, slots=True)
class SettleRules:
    """Which cycles are worth settling, how often to look for them, and how many to settle at once."""

    threshold_tokens: int = 128
    """Smallest amount worth a swap (the paper's empirical minimum)."""
    interval_s: float = 2.0
    most_at_once: int = 64
    """Cycles at a time; they share no worker."""
    valid_for_s: float = 5.0


@dataclass(slots=True)
class _Running:
    """A running settlement: its cycle, its phase, and the answers to that phase."""

    name: str
    cycle: Settlement
    block_tokens: Mapping[str, int]
    phase: SettlePhase = SettlePhase.FREEZE
    round: int = 0
    round_tokens: int = 0
    left_tokens: int = 0
    bounce_tokens: int = 0
    settled_tokens: int = 0
    answers: dict[str, Settled | None] = field(default_factory=dict)


class Coordinator:
    """Leads one ledger's settlements through their phases, several at a time between different workers.

    A worker takes part in one settlement and refuses others, so two ledgers that lead by mistake do no harm.
    """

    def __init__(self, prefix: str, rules: SettleRules | None = None) -> None:
        """`prefix` makes the names of settlements unique."""
        self._prefix = prefix
        self._rules = rules or SettleRules()
        self._running: dict[str, _Running] = {}
        self._count = 0
        self._next_s = 0.0
        self.completed = 0
        self.aborted = 0
        self.last_end = ""
        """Phase at which the last settlement ended, and each worker's (blocks, bounce blocks) in it."""
        self.settled_tokens = 0
        """Tokens settled by completed rounds, summed over all members."""

    @property
    def running(self) -> int:
        return len(self._running)

    def busy(self) -> set[str]:
        """Return the workers in running settlements."""
        return {member for one in self._running.values() for member in one.cycle.members}

    def on_tick(
        self, debts: Mapping[tuple[str, str], int], block_tokens: Mapping[str, int], now_s: float
    ) -> list[SettlementAsk]:
        """Start settlements; `debts` in tokens by (debtor, creditor) of living workers."""
        if now_s < self._next_s:
            return []
        self._next_s = now_s + self._rules.interval_s
        taken = self.busy()
        asks: list[SettlementAsk] = []
        for cycle in settlements(debts, self._rules.threshold_tokens):
            if len(self._running) >= self._rules.most_at_once:
                break
            if taken.isdisjoint(cycle.members) and all(name in block_tokens for name in cycle.members):
                taken.update(cycle.members)
                self._count += 1
                name = f"{self._prefix}-{self._count}"
                sizes = {member: block_tokens[member] for member in cycle.members}
                one = self._running[name] = _Running(name, cycle, sizes, left_tokens=cycle.amount)
                asks += self._ask_all(one, cycle.amount)
        return asks

    def on_answer(self, asked: Settle, worker_id: str, answer: Settled | None) -> list[SettlementAsk]:
        """Take in a worker's answer to a phase, None for silence or an error; return the next messages."""
        one = self._running.get(asked.settlement)
        is_due = one is not None and (one.phase, one.round) == (asked.phase, asked.round)
        if one is None or not is_due or worker_id not in one.cycle.members:
            return []
        one.answers[worker_id] = answer
        return self._go_on(one) if len(one.answers) == len(one.cycle.members) else []

    def check_integrity(self) -> None:
        """Raises AssertionError when two settlements share a worker, or one has settled too much."""
        members = [member for one in self._running.values() for member in one.cycle.members]
        assert len(members) == len(set(members)), "a worker takes part twice"
        assert len(self._running) <= self._rules.most_at_once
        for name, one in self._running.items():
            assert name == one.name and set(one.answers) <= set(one.cycle.members)
            assert len(one.answers) < len(one.cycle.members), "all have answered and nothing came of it"
            assert one.settled_tokens + one.left_tokens <= one.cycle.amount

    def _go_on(self, one: _Running) -> list[SettlementAsk]:
        if one.phase is SettlePhase.UNFREEZE:
            del self._running[one.name]
            return []
        least = self._least(one)
        if one.phase is SettlePhase.FREEZE:
            one.left_tokens = least
            bounce = [answer.bounce_blocks if answer else 0 for answer in one.answers.values()]
            one.bounce_tokens = min(bounce) * min(one.block_tokens.values())
            if least < self._rules.threshold_tokens or one.bounce_tokens == 0:
                return self._finish(one)
            return self._copy(one)
        if least < one.round_tokens:
            return self._finish(one)
        if one.phase is SettlePhase.COPY:
            return self._enter(one, SettlePhase.COMMIT, one.round_tokens)
        one.settled_tokens += one.round_tokens
        one.left_tokens -= one.round_tokens
        one.round += 1
        return self._copy(one) if one.left_tokens else self._finish(one)

    def _copy(self, one: _Running) -> list[SettlementAsk]:
        one.round_tokens = min(one.left_tokens, one.bounce_tokens)
        return self._enter(one, SettlePhase.COPY, one.round_tokens)

    def _finish(self, one: _Running) -> list[SettlementAsk]:
        whole = one.left_tokens == 0 and one.settled_tokens > 0
        self.completed += whole
        self.aborted += not whole
        said = {name: told and (told.blocks, told.bounce_blocks) for name, told in one.answers.items()}
        self.last_end = f"{one.phase} {one.round}, {one.cycle.amount} tokens: {said}"
        self.settled_tokens += one.settled_tokens * len(one.cycle.members)
        return self._enter(one, SettlePhase.UNFREEZE, 0)

    def _enter(self, one: _Running, phase: SettlePhase, tokens: int) -> list[SettlementAsk]:
        one.phase = phase
        one.answers = {}
        return self._ask_all(one, tokens)

    def _ask_all(self, one: _Running, tokens: int) -> list[SettlementAsk]:
        asks, members = [], one.cycle.members
        is_freeze = one.phase is SettlePhase.FREEZE
        for at, member in enumerate(members):
            message = Settle(
                settlement=one.name,
                phase=one.phase,
                round=one.round,
                creditor_id=members[(at + 1) % len(members)] if is_freeze else "",
                debtor_id=members[at - 1] if is_freeze else "",
                blocks=tokens // one.block_tokens[member],
                valid_for_s=self._rules.valid_for_s,
            )
            asks.append(SettlementAsk(member, message))
        return asks

    def _least(self, one: _Running) -> int:
        """Return the tokens that all answers allow, in whole blocks of the largest size."""
        tokens = min(
            (answer.blocks if answer is not None else 0) * one.block_tokens[member]
            for member, answer in one.answers.items()
        )
        largest = max(one.block_tokens.values())
        return tokens // largest * largest


class Leadership:
    """Decides whether this ledger leads settlements: the one with the smallest id does.

    Each ledger must hear its own announcements: one that does not was cut off or stopped, and leads again
    after it has listened for `silence_s`. The time passed in must continue while the process is stopped.
    """

    def __init__(self, ledger_id: str, incarnation: int, *, silence_s: float = 2.0) -> None:
        self._id = ledger_id
        self._incarnation = incarnation
        self._silence_s = silence_s
        self._ledgers = Liveness(silence_s)
        self._since_s: float | None = None
        """When it began to hear itself without a gap."""

    def on_announced(self, ledger_id: str, incarnation: int, now_s: float) -> None:
        """Take in an announcement of any ledger. Only the latest incarnation of an id counts."""
        self._ledgers.silent(now_s)
        was_heard = self._hears_itself()
        is_present = self._ledgers.hear(ledger_id, incarnation, now_s)
        if is_present and self._hears_itself() and not was_heard:
            self._since_s = now_s

    def leads(self, now_s: float) -> bool:
        """Return whether this ledger leads now."""
        self._ledgers.silent(now_s)
        if self._since_s is None or not self._hears_itself():
            return False
        return now_s - self._since_s >= self._silence_s and min(self._ledgers) == self._id

    def heard(self, now_s: float) -> list[str]:
        """Return the ids of living ledgers, in order."""
        self._ledgers.silent(now_s)
        return sorted(self._ledgers)

    def check_integrity(self) -> None:
        """Raise AssertionError when it hears itself without knowing since when."""
        assert not self._hears_itself() or self._since_s is not None

    def _hears_itself(self) -> bool:
        """Return whether it heard itself, as of the last check."""
        return self._ledgers.present(self._id) == self._incarnation
