"""Which cycles of debts to settle, by how much, in which order. Pure.

Shortest first, of equal length the largest amount, by enumeration while that is cheap (`search_steps`). What
is left then are the long cycles of a large graph: a depth-first search cancels them as it meets them, and
never looks twice at a debt that leads nowhere. Afterwards no cycle of debts ≥ the threshold is left. Every
net balance stays what it was: whoever is owed less also owes less.
Source: papers/001 §4.5; `algorithms.md` §4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from services.ledger.core.dgfm.graph import DebtGraph

SEARCH_STEPS = 200_000
"""Of the enumeration of short cycles, each well below a microsecond."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """A cycle in which each member owes the next one and the last owes the first. All debts shrink by
    `amount`."""

    members: tuple[str, ...]
    amount: int

    def pairs(self) -> list[tuple[str, str]]:
        """(debtor, creditor)."""
        return list(zip(self.members, (*self.members[1:], self.members[0]), strict=True))


def settlements(
    debts: Mapping[tuple[str, str], int], threshold: int, *, search_steps: int = SEARCH_STEPS
) -> list[Settlement]:
    """What to settle, in order. `debts` by (debtor, creditor); nothing below `threshold` is swapped.

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
    """What is owed afterwards; nothing is not listed. Raises ValueError when more is settled than owed."""
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
    """Settles cycles of one length. An amount that has shrunk since it was ranked is ranked anew."""
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
    """Cancels the cycle that closes, steps back to where its first debt is gone, goes on from there."""
    settled: list[tuple[list[int], int]] = []
    to_try = [list(creditors) for creditors in graph.owed]
    """Debts not known to lead nowhere; the last one is being tried."""
    place = [-1] * len(to_try)
    """On the path; -1 is elsewhere."""
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
    """Settles the cycle at the path's end. Returns the place of the first debtor whose debt is gone."""
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
