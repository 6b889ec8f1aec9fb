"""How close decodes on a CUDA device come to what its memory can deliver."""
