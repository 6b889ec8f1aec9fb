"""Mutation testing of the decision cores: 400 recorded mutants, and how many of them the tests kill."""
