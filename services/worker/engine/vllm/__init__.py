"""Engine on vLLM's model runners: Kvasir's rows, blocks and sampler, vLLM's models, kernels and KV."""
