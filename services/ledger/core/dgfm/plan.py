"""Chooses the cycles of debts to settle, their amounts and their order. Pure. Source: papers/001 §4.5.

Short cycles come first, and larger amounts at equal length, by enumeration while that is cheap
(`search_steps`). Then a depth-first search cancels cycles as it meets them. Unlike the paper's Algorithm 1,
this finds directed cycles: it misses no pair that owe each other, and takes no two paths for a cycle.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

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
