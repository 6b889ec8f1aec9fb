"""Tests of the bulk plane: `test_contract.py` holds for every transport."""
