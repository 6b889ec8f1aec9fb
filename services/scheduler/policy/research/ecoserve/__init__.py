"""EcoServe's variants, one class each, out of shared parts. Source: papers/003; algorithms.md §1."""
