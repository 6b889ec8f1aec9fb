"""Memory bandwidth that decodes use on a CUDA device, against its limit."""
