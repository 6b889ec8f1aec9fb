"""`python -m bench together`: what the mechanisms for short memory bring together."""
