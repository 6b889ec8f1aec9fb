"""`python -m bench serve`: Poisson arrivals with little KV, policies and engines compared."""
