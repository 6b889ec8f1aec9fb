"""`python -m bench distattention`: attention over keys at other workers."""
