"""Pie in simulated time: the live controllers, without a byte moved (docs/pie.md)."""
