"""Tests of the models that ship with Kvasir."""
