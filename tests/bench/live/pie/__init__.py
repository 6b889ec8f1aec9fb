"""Tests of bench/live/pie."""
