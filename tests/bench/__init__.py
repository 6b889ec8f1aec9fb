"""Tests of the benches: their arithmetic, their processes, and short runs of them."""
