"""vLLM's model runners below Kvasir's plans: our rows, blocks and sampler; its models, kernels and KV."""
