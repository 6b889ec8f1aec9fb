"""Tests of bench/pie."""
