"""What more blocks would bring, before any is given out. Pure.

A decoding step takes a fixed time (every weight is read once) and a time for each of its rows; more blocks
let more rows run at once, and what lies outside has to be copied in for each step:

    40 ms and 5 ms a row; 8 rows fill the memory; 1.8 times as many blocks, 4 ms of copies
    now 8 rows in 80 ms, 100 tokens/s; then 14.4 rows in 112 + 4 ms, 124 tokens/s: a gain of 0.24

Where rows, or their copies, cost nearly all of a step, as with a tiny model, more of them bring nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Of one decoding step, as measured."""

    fixed_s: float
    row_s: float

    @classmethod
    def of(cls, few: tuple[int, float], many: tuple[int, float]) -> "DecodeCost":
        """From steps of two sizes, as (rows, seconds)."""
        (few_rows, few_s), (many_rows, many_s) = few, many
        row_s = max(0.0, (many_s - few_s) / (many_rows - few_rows))
        return cls(max(0.0, few_s - few_rows * row_s), row_s)

    def step_s(self, rows: float) -> float:
        return self.fixed_s + rows * self.row_s

    def gain(self, rows: float, ratio: float, copies_s: float) -> float:
        """Of throughput, as a share, when `ratio` times as many rows as these run at once, and `copies_s` of
        copying are in the way of each step. 0 where nothing runs."""
        now_s, then_s = self.step_s(rows), self.step_s(rows * ratio) + copies_s
        return ratio * now_s / then_s - 1 if rows > 0 and then_s > 0 else 0.0
