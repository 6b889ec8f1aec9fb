"""Three keys, of which one floods: what the others notice, simulated and live."""
