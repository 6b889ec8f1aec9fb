"""Hits, savings and costs of the prefix cache."""
