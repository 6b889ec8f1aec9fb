"""`python -m bench sim-ecoserve`: EcoServe and `kvasir` against their rivals, simulated."""
