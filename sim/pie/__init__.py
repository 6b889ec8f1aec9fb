"""Pie in simulated time: the live controllers, with no bytes moved (docs/pie.md)."""
