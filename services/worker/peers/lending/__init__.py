"""KV memory lent and borrowed between workers: Infinite-LLM's rManager (papers/001 §4.3, §4.4)."""
