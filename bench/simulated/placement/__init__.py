"""`python -m bench placement`: GPUs, memory use and migrations of MELL against its rivals, simulated."""
