"""`python -m bench engine`: our engine as it is served against a peer, same checkpoint, a core each."""
