"""Chooses the cycles of debts to settle, their amounts and their order. Pure.

Short cycles come first, and larger amounts at equal length, by enumeration while that is cheap
(`search_steps`). In a large graph only long cycles are left then: a depth-first search cancels them as it
meets them, and tries each debt once. Afterwards no cycle of debts of at least the threshold is left. Every
net balance is unchanged. Source: papers/001 §4.5; `algorithms.md` §4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from services.ledger.core.dgfm.graph import DebtGraph

SEARCH_STEPS = 200_000
"""Steps of the enumeration of short cycles, each well below a microsecond."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """A cycle in which each member owes the next, and the last the first. All debts shrink by `amount`."""

    members: tuple[str, ...]
    amount: int

    def pairs(self) -> list[tuple[str, str]]:
        """Return the cycle's debts as (debtor, creditor)."""
        return list(zip(self.members, (*self.members[1:], self.members[0]), strict=True))


def settlements(
    debts: Mapping[tuple[str, str], int], threshold: int, *, search_steps: int = SEARCH_STEPS
) -> list[Settlement]:
    """Return the settlements, in order. `debts` by (debtor, creditor), none below `threshold`.

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


def apply(debts: Mapping[tuple[str, str], int], settled: list[Settlement]) -> dict[tuple[str, str], int]:
    """Return the debts left, without zeros. Raises ValueError when more is settled than owed."""
    left = dict(debts)
    for settlement in settled:
        for pair in settlement.pairs():
            if left.get(pair, 0) < settlement.amount:
                raise ValueError(f"{pair} owe {left.get(pair, 0)}, {settlement.amount} would be settled")
            left[pair] -= settlement.amount
    return {pair: amount for pair, amount in left.items() if amount}


def _short_cycles(graph: DebtGraph, search_steps: int) -> list[tuple[list[int], int]]:
    settled: list[tuple[list[int], int]] = []
    length = 2
    while not graph.is_empty and search_steps > 0 and length <= len(graph.owed):
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
