"""EcoServe's variants, one class each, built from shared parts. Source: papers/003; algorithms.md §1."""
