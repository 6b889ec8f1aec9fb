"""Cycles of debts between workers are found and settled: DGFM. Source: papers/001 §4.5."""
