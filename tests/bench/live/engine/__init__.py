"""Tests of the engine bench."""
