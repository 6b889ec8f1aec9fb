"""`python -m bench pie`."""
