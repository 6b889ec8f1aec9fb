"""Shared parts of the benches: stacks, cores, load, models, turns, statistics, pictures, records."""
