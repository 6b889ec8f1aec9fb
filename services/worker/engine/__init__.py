"""Computing tokens. Knows tensors and models; knows no sequence, plan, bus or scheduler."""
