"""Parts of the engine for CUDA devices: Triton kernels over paged KV and CUDA graphs for decodes."""
