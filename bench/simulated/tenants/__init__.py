"""Three tenants, one of which floods the queue: effect on the others, simulated and live."""
