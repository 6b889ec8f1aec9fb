"""Tests of the bulk plane: `test_base.py` holds for every transport."""
