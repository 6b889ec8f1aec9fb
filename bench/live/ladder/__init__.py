"""`python -m bench ladder`: value of each relief mechanism when memory is full."""
