"""`python -m bench serve`: Poisson arrivals on a tight KV, policy against policy, engine against engine."""
