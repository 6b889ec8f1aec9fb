"""Benches in simulated time: the live decisions at computed costs, against their rivals and their papers."""
