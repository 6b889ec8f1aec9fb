"""Policies for experiments: the rivals and the steps of papers/003. Selected by name, like any other."""
