"""`python -m bench ladder`: what each way out of a full memory is worth."""
