"""Pie: the KV of a few layers is always on its way to host memory and back, unnoticed (papers/004)."""
