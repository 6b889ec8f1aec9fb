"""Measures of how hard the code is to enter."""
