"""Benches in simulated time: live decisions at modelled costs, against their rivals and their papers."""
