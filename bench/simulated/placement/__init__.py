"""`python -m bench placement`: GPUs, use of memory and moves of MELL against its rivals, simulated."""
