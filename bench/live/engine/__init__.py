"""`python -m bench engine`: our served engine against a peer, with the same checkpoint and a core each."""
