"""`python -m bench migrate`: live migrations while clients read."""
