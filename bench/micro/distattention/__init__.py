"""`python -m bench distattention`: attention over keys that other workers hold."""
