"""Tests of the table of data files."""
