"""DistAttention: attention over KV blocks that other workers lend (docs/distattention.md)."""
