"""Tests of sim/pie."""
