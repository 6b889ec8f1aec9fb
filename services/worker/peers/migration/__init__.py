"""Blocks of KV fetched from other workers by name, for sequences that move (docs/migration.md)."""
