"""Finds and settles cycles of debts between workers (DGFM). Source: papers/001 §4.5."""
