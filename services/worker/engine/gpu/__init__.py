"""The engine's parts for CUDA devices: Triton kernels over paged KV, and CUDA graphs for decodes."""
