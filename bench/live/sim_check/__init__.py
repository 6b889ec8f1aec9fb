"""`python -m bench sim-check`: error of the simulator against live runs."""
