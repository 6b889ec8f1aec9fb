"""DistAttention: attention over KV blocks that other workers lend (docs/lending.md)."""
