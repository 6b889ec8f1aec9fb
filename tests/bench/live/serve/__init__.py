"""Tests of the serve bench."""
