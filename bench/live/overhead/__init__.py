"""Overhead of gateway, bus and scheduler over the engine alone."""
