"""`python -m bench migrate`: live migrations under load."""
