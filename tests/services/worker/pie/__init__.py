"""Tests of services/worker/pie."""
