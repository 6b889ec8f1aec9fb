"""Benches of one part alone: an engine step, a planning step, a link, a kernel, a model."""
