"""Debts as a directed graph with edges from debtor to creditor, and its cycles. Pure.

The paper's Algorithm 1 marks visited nodes and follows a single parent, as in an undirected graph. It misses
a pair that owe each other, and takes two paths between two nodes for a cycle. This module finds true
directed cycles. Knows no worker and no unit. Source: papers/001 §4.5; `algorithms.md` §4 (DGFM).
"""

from collections.abc import Iterable, Mapping


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

    @property
    def is_empty(self) -> bool:
        return not any(self.owed)

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
            return self._pairs()
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

    def _pairs(self) -> tuple[list[list[int]], int]:
        owed = self.owed
        found = [[a, b] for a, creditors in enumerate(owed) for b in creditors if a < b and a in owed[b]]
        return found, sum(map(len, owed))
