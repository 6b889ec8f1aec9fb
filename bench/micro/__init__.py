"""Benches of single parts: an engine step, a planning step, a link, a kernel, a model."""
