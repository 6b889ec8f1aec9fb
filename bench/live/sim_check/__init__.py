"""`python -m bench sim-check`: live runs replayed in the simulator, and how far off that is."""
